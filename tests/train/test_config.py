import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from engine.plan import Capacity
from train.config import DataOptions, LearnerOptions, ModelOptions, RolloutOptions, RunOptions, TrainConfig

GIVEN = {"model": ModelOptions(path="m"), "data": DataOptions(task="calculator")}


def test_defaults_with_model_and_task_are_a_configuration():
    config = TrainConfig(**GIVEN)
    assert config.rollout.capacity == Capacity()
    with pytest.raises(FrozenInstanceError):
        config.run.steps = 3


@pytest.mark.parametrize(
    "section, field, value, remedy",
    [
        (ModelOptions, "dtype", "float16", "bfloat16"),
        (ModelOptions, "dtype", "float64", "references"),
        (ModelOptions, "dtype", "int8", '"float32", "bfloat16"'),
        (ModelOptions, "profile", "fast", '"hf", "fused"'),
        (ModelOptions, "device", "gpu", "cuda"),
        (DataOptions, "long_prompts", "cut", '"error", "skip"'),
        (DataOptions, "max_prompt_tokens", 0, "at least 1"),
        (DataOptions, "limit", 0, "at least 1"),
        (DataOptions, "data_seed", -1, "at least 0"),
        (RolloutOptions, "temperature", 0.0, "above 0"),
        (RolloutOptions, "temperature", -1.0, "above 0"),
        (RolloutOptions, "temperature", math.inf, "above 0"),
        (RolloutOptions, "temperature", math.nan, "number"),
        (RolloutOptions, "temperature", "warm", "number"),
        (RolloutOptions, "group_size", 1, "at least 2"),
        (RolloutOptions, "group_size", 8.0, "integer"),
        (RolloutOptions, "group_size", True, "integer"),
        (RolloutOptions, "prompts_per_step", 30, "multiple of rollout.cohorts = 4"),
        (RolloutOptions, "group_size", 10**9, "32,000,000,000 samples, at most 1,048,576"),
        (RolloutOptions, "max_new_tokens", 10**9, "256,000,000,000 tokens, at most 17,179,869,184"),
        (RolloutOptions, "cohorts", 0, "at least 1"),
        (RolloutOptions, "max_new_tokens", 0, "at least 1"),
        (RolloutOptions, "stop", ("a", ""), "empty"),
        (RolloutOptions, "stop", "a", "list of texts"),
        (LearnerOptions, "learning_rate", -1e-6, "at least 0"),
        (LearnerOptions, "learning_rate", math.inf, "finite"),
        (LearnerOptions, "betas", (0.9, 1.0), "[0, 1)"),
        (LearnerOptions, "betas", (0.9,), "2 numbers"),
        (LearnerOptions, "betas", ("0.9", 0.9), "2 numbers"),
        (DataOptions, "limit", "all", 'an integer or "none"'),
        (LearnerOptions, "eps", 0.0, "above 0"),
        (LearnerOptions, "clip_norm", 0.0, "inf never clips"),
        (LearnerOptions, "clip_low", 1.1, "[0, 1]"),
        (LearnerOptions, "clip_high", -0.1, "at least 0"),
        (LearnerOptions, "min_ratio", 2.0, "[0, 1]"),
        (LearnerOptions, "denominator", 0.0, "above 0"),
        (LearnerOptions, "denominator", "samples", "sequences"),
        (LearnerOptions, "mask_truncated", "length", "true or false"),
        (LearnerOptions, "kl_coefficient", 0.1, "learner.reference"),
        (LearnerOptions, "reference", "", "initial"),
        (LearnerOptions, "advantage", "batch", '"group", "none", "leave-one-out"'),
        (LearnerOptions, "epochs", 0, "at least 1"),
        (LearnerOptions, "micro_batch_sequences", 0, "at least 1"),
        (LearnerOptions, "audit_every", 0, "at least 1"),
        (LearnerOptions, "replay", "never", '"audit", "always"'),
        (LearnerOptions, "gate_objective", "entropy", '"none"'),
        (LearnerOptions, "recompute", 1, "true or false"),
        (LearnerOptions, "warmup_steps", -1, "at least 0"),
        (RunOptions, "steps", 0, "at least 1"),
        (RunOptions, "keep", 0, "at least 1"),
        (RunOptions, "eval_samples", 10**9, "at most 1,048,576"),
        (RunOptions, "seed", 2**64, "2^64"),
        (RunOptions, "save_every", -1, "at least 0"),
        (RunOptions, "threads", 0, "at least 1"),
        (LearnerOptions, "logprob_chunk", 2**63, "below 2^63"),  # failed in the first update, without a name
        (RunOptions, "dir", "", "folder"),
        (RunOptions, "resume", "", "auto"),
    ],
)
def test_impossible_values_name_field_value_and_remedy(section, field, value, remedy):
    prefix = section.__name__.removesuffix("Options").lower()
    with pytest.raises(ValueError) as caught:
        section(**{field: value})
    message = str(caught.value)
    assert f"{prefix}.{field}" in message and remedy in message
    shown = value[1] if value == (0.9, 1.0) else value
    assert repr(shown) in message


@pytest.mark.parametrize(
    "changes, field, remedy",
    [
        ({"model": ModelOptions()}, "model.path", "folder"),
        ({"data": DataOptions()}, "data.path", "data.task"),
        ({"data": DataOptions(path="x.jsonl")}, "data.reward", "file.py:function"),
        (
            {"learner": LearnerOptions(updates_per_rollout=3)},
            "learner.updates_per_rollout",
            "divide rollout.cohorts = 4",
        ),
        ({"learner": LearnerOptions(audit_cohorts=5)}, "learner.audit_cohorts", "rollout.cohorts = 4"),
        ({"learner": LearnerOptions(schedule="linear", warmup_steps=101)}, "learner.warmup_steps", "100 steps"),
    ],
)
def test_sections_that_contradict_each_other(changes, field, remedy):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**{**GIVEN, **changes})
    assert field in str(caught.value) and remedy in str(caught.value)


def test_modes_of_a_run_exclude_each_other():
    with pytest.raises(ValueError, match="from_logs"):
        RunOptions(rollout_only=True, from_logs="logs")


def test_training_from_logs_needs_no_data():
    TrainConfig(model=ModelOptions(path="m"), run=RunOptions(from_logs="runs/a"))


def test_allowed_edges():
    LearnerOptions(learning_rate=0.0, clip_norm=math.inf, denominator=512.0, clip_low=0.0, clip_high=0.0)
    LearnerOptions(denominator="sequences", advantage="leave-one-out", mask_truncated=True)
    RolloutOptions(group_size=2**15, prompts_per_step=32, max_new_tokens=2**14)
    LearnerOptions(kl_coefficient=0.1, reference="initial", warmup_steps=500)
    replace(GIVEN["model"], device="cuda:1", dtype="bfloat16")
    RolloutOptions(group_size=2, prompts_per_step=4, cohorts=4, temperature=1)
    TrainConfig(**GIVEN, learner=LearnerOptions(warmup_steps=500))


def test_every_setting_has_a_sentence():
    """Fields are documented where they are declared."""
    import inspect

    for section in (ModelOptions, DataOptions, RolloutOptions, LearnerOptions, RunOptions):
        lines = inspect.getsource(section).splitlines()
        for field in fields(section):
            declared = next(line for line in lines if line.strip().startswith(f"{field.name}:"))
            assert "  # " in declared, f"{section.__name__}.{field.name}"
