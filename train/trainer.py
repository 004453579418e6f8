"""The training loop. Read `Trainer.run` and `Trainer.step` aloud: they are the architecture.

Everything is built in `train/run.py` and handed in.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Completion
from rollout.collect import Cohort, write_cohort
from rollout.samples import write_rows
from rollout.statistics import Statistics, statistics
from train.advantages import Advantages, group_advantages
from train.config import TrainConfig
from train.evaluation import Evaluation
from train.learner import Batch, Learner
from train.metrics import RunMetrics
from train.rollouts import LoggedRollouts, SampledRollouts, cohort_folder
from train.run_state import RunState


class StopSignal:
    """SIGINT, SIGTERM and SIGUSR1 ask the loop to save after the current step and leave.

    A second SIGINT interrupts at once: what is lost is the current step.
    """

    def __init__(self):
        self.received: str | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


@dataclass
class Trainer:
    """One run. `evaluate` runs one evaluation, or is None where there is no data for it."""

    config: TrainConfig
    learner: Learner
    rollouts: SampledRollouts | LoggedRollouts
    state: RunState
    metrics: RunMetrics
    stop: StopSignal
    evaluate: Callable[[], Evaluation] | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.run.dir)

    def run(self) -> None:
        """Train from the step after the loaded checkpoint to `run.steps`, or until a signal."""
        run = self.config.run
        if self.state.step == 0 and (row := self.evaluate_if_due(0)):
            self.metrics.log(0, row)
        for step in range(self.state.step + 1, run.steps + 1):
            row = self.step(step)
            self.state.step = step
            if self.stop.received is None:  # a signal wants the checkpoint, not another evaluation
                row |= self.evaluate_if_due(step)
            self.metrics.log(step, row)
            last = step == run.steps or self.stop.received is not None
            if last or (run.save_every and step % run.save_every == 0):
                self.state.save(self.learner)
            if self.stop.received is not None:
                self.metrics.say(f"{self.stop.received}: saved after step {step}; resume with "
                                 "run.resume=auto")
                break
        self.metrics.close()

    def step(self, step: int) -> dict[str, float]:
        """Roll out, grade, replay, update: one training step and its metrics."""
        began = time.perf_counter()
        cohorts = [self.rollouts.cohort(step, index, self.metrics.on_finish)
                   for index in range(self.config.rollout.cohorts)]
        rolled = time.perf_counter() - began
        advantages = self.advantages(cohorts)
        batches = make_batches(cohorts, advantages, self.config.learner.mask_truncated)
        if self.config.run.from_logs is None:
            for batch, cohort in zip(batches, cohorts, strict=True):
                write_cohort(cohort, batch.advantages,
                             cohort_folder(self.folder / "logs", step, batch.index))
        self.metrics.show_samples(step, sample_rows(cohorts[0], batches[0]))
        row = rollout_metrics(cohorts, advantages)
        if not self.config.run.rollout_only:
            row |= self.learner.step(batches, step)
        return row | {"seconds/rollout": rolled, "seconds/step": time.perf_counter() - began}

    def advantages(self, cohorts: Sequence[Cohort]) -> Advantages:
        """Group statistics over the whole step, so that they do not depend on the cohorts."""
        keys = [(c.request.dataset, c.request.group) for cohort in cohorts
                for c in cohort.log.completions]
        rewards = [score.value for cohort in cohorts for score in cohort.scores]
        return group_advantages(rewards, keys, self.config.learner.advantage)

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Run and store an evaluation where step and configuration ask for one."""
        every = self.config.run.eval_every
        if self.evaluate is None or not every or (step % every and step != self.config.run.steps):
            return {}
        result = self.evaluate()
        write_rows(result.rows, self.folder / "eval" / f"step-{step:06d}.jsonl")
        summary = {name: value for name, value in result.summary.items()
                   if isinstance(value, (int, float)) and not isinstance(value, bool)}
        self.metrics.say(f"evaluation at step {step}: accuracy {summary['accuracy']:.3f} "
                         f"[{summary['accuracy_low']:.3f}, {summary['accuracy_high']:.3f}]")
        return {f"eval/{name}": value for name, value in summary.items()}


def make_batches(cohorts: Sequence[Cohort], advantages: Advantages, mask_truncated: bool = False) -> list[Batch]:
    """Cut the step's advantages back into cohorts.

    mask_truncated: samples that the engine ended by length are left out of training, so of loss and
    denominator. Whatever their last token is, that decides: it may be a stop id of another tool. Their
    rewards have counted in `advantages` like any other, as mask_truncated_completions of TRL has it.
    """
    batches, at = [], 0
    for index, cohort in enumerate(cohorts):
        completions = cohort.log.completions
        stop = at + len(completions)
        trained = tuple(scored and not (mask_truncated and completion.finish_reason == "length")
                        for scored, completion in zip(advantages.scored[at:stop], completions, strict=True))
        batches.append(Batch(index, cohort.log, advantages.values[at:stop], trained))
        at = stop
    return batches


def rollout_metrics(cohorts: Sequence[Cohort], advantages: Advantages) -> dict[str, float]:
    """What the rollout of a step was like."""
    completions = [c for cohort in cohorts for c in cohort.log.completions]
    scored = [s.value for cohort in cohorts for s in cohort.scores if s.value is not None]
    total: Statistics = sum((statistics(cohort.log) for cohort in cohorts[1:]),
                            start=statistics(cohorts[0].log))
    seconds = sum(cohort.seconds for cohort in cohorts)
    row = {
        "reward/mean": sum(scored) / len(scored) if scored else float("nan"),
        "reward/within_group_std": advantages.within_group_std,
        "reward/zero_variance": advantages.zero_variance,
        "reward/unscored": len(completions) - len(scored),
        "rollout/length": total.tokens / len(completions),
        "rollout/cut_by_length": _share(completions, "length"),
        "rollout/tokens_per_second": total.tokens / seconds if seconds else float("nan"),
        "rollout/passes_per_token": total.passes_per_token, "rollout/rows_per_pass": total.rows_per_pass,
        "rollout/mean_depth": total.mean_depth, "rollout/peak_catch_up": total.peak_catch_up,
    }
    row |= {f"rollout/depth_{depth}": share for depth, share in enumerate(total.depth_shares, 1)}
    parts: dict[str, list[float]] = {}
    for cohort in cohorts:
        for score in cohort.scores:
            for name, value in score.parts.items():
                parts.setdefault(name, []).append(value)
    return row | {f"reward/{name}": sum(values) / len(values) for name, values in sorted(parts.items())}


def _share(completions: Sequence[Completion], reason: str) -> float:
    return sum(c.finish_reason == reason for c in completions) / len(completions)


def sample_rows(cohort: Cohort, batch: Batch) -> list[dict]:
    """The first group of a step, for a person to read."""
    first = cohort.log.completions[0].request.group
    return [{"example": c.request.example, "sample": c.request.sample, "text": text, "answer": answer,
             "reward": score.value, "advantage": advantage, "exit_depths": list(c.exit_depths),
             "finish_reason": c.finish_reason}
            for c, text, answer, score, advantage in zip(
                cohort.log.completions, cohort.texts, cohort.answers, cohort.scores, batch.advantages,
                strict=True) if c.request.group == first]
