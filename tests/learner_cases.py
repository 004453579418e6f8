"""A small learner and cohorts for it: real engine runs of a tiny model."""

from __future__ import annotations

import torch
from tiny_models import tiny_model, tokens

from engine import Capacity, Engine, Request, Sampling
from rollout.log import ScheduleLog, from_rollout
from train.config import (
    DataOptions,
    LearnerOptions,
    ModelOptions,
    RolloutOptions,
    RunOptions,
    TrainConfig,
)
from train.learner import Batch, Learner
from train.masters import Masters

ADVANTAGES = (1.0, -1.0, 0.5, -0.5)


def make_config(dtype: str = "float32", cohorts: int = 2, **learner) -> TrainConfig:
    """Cohorts of one group of 4; learning rate 0.01 unless said otherwise."""
    return TrainConfig(
        model=ModelOptions(path="tiny", dtype=dtype), data=DataOptions(path="none", reward="none"),
        rollout=RolloutOptions(cohorts=cohorts, prompts_per_step=cohorts, group_size=4),
        learner=LearnerOptions(**{"learning_rate": 0.01, **learner}), run=RunOptions())


def make_learner(config: TrainConfig, *, reference: bool = False, **model) -> Learner:
    """A learner whose masters are the tiny model's weights."""
    dtype = getattr(torch, config.model.dtype)
    masters = Masters(tiny_model(dtype=torch.float32, **model).weights)
    frozen = tiny_model(dtype=dtype, **model) if reference else None
    learner = Learner(config, tiny_model(dtype=dtype, **model), masters, frozen)
    learner.publish()
    return learner


def make_log(model, cohort: int = 0, step: int = 1, schedule: str = "exit:gate=0.6",
             temperature: float = 0.9, count: int = 4, stop_ids: tuple[int, ...] = ()) -> ScheduleLog:
    """One cohort: `count` sequences with prompts of unequal lengths, 9 new tokens or up to a stop id."""
    requests = [Request(tuple(tokens(3 + 4 * index, seed=cohort)), 9, uid=1000 * step + 10 * cohort + index,
                        dataset="d", example=str(cohort), group=cohort, sample=index)
                for index in range(count)]
    capacity = Capacity(max_sequences=3, max_rows=16, max_span=5, pages=120, page_size=4)
    return from_rollout(Engine(model, schedule, capacity).generate(
        requests, Sampling(seed=5, temperature=temperature, stop_ids=stop_ids)))


def make_batches(learner: Learner, step: int = 1, advantages=ADVANTAGES, **log) -> list[Batch]:
    """One batch a cohort of the configuration."""
    return [Batch(cohort, make_log(learner.model, cohort, step, count=len(advantages), **log),
                  tuple(advantages), (True,) * len(advantages))
            for cohort in range(learner.config.rollout.cohorts)]


def captured_gradient(learner, batches, step=1):
    """The gradient that the optimizer receives, before clipping."""
    found = []
    take = learner.optimizer.step
    learner.optimizer.step = lambda gradient, lr: found.append(gradient.clone()) or take(gradient, lr)
    metrics = learner.step(batches, step)
    learner.optimizer.step = take
    return found, metrics
