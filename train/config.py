"""What a training run is: frozen sections, composed once in `TrainConfig`, each checked when made.

Knows field names and what is impossible; reading and writing files is `config_file`'s. Relative
paths are relative to the caller's directory. An interval of 0 means "never".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from engine.plan import Capacity
from train.settings import kinds, mismatch

# Of one step, beyond any sense: larger numbers would end in the machine's memory, without a name.
MOST_SAMPLES = 2**20
MOST_TOKENS = 2**34


def _require(good: bool, name: str, value: Any, remedy: str) -> None:
    if not good:
        raise ValueError(f"{name} = {value!r}: {remedy}")


def _check_types(section: Any, prefix: str) -> None:
    for name, kind in kinds(type(section)).items():
        value = getattr(section, name)
        expected = None if is_dataclass(kind) and isinstance(value, kind) else mismatch(value, kind)
        _require(expected is None, f"{prefix}.{name}", value, f"must be {expected}")
        _require(not (isinstance(value, float) and math.isnan(value)), f"{prefix}.{name}", value, "must be a number")


def _require_least(section: Any, prefix: str, least: int, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value is None or value >= least, f"{prefix}.{name}", value, f"must be at least {least}")
        good = not isinstance(value, int) or value < 2**63  # torch's sizes are 64-bit
        _require(good, f"{prefix}.{name}", value, "must be below 2^63")


@dataclass(frozen=True)
class ModelOptions:
    """The policy and where it runs."""

    path: str = ""  # model folder in the published format (config.json, model.safetensors)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the compute copy; masters are always float32
    profile: Literal["hf", "fused"] = "hf"  # rounding profile
    numerics: Literal["shapes", "invariant", "auto"] = "shapes"  # how bits repeat; auto: invariant where it holds
    linear: Literal["native", "packed", "auto"] = "native"  # linear operator; auto: packed for wide models on cpu
    device: str = "cpu"  # cpu, cuda or cuda:N

    def __post_init__(self) -> None:
        remedies = {
            "float16": "its exponent range is too small for gradients and logits; use bfloat16 or float32",
            "float64": "float64 is for references; train in float32 or bfloat16",
        }
        _require(self.dtype not in remedies, "model.dtype", self.dtype, remedies.get(self.dtype, ""))
        _check_types(self, "model")
        good = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        _require(good, "model.device", self.device, "use cpu, cuda or cuda:N")


@dataclass(frozen=True)
class DataOptions:
    """Prompts, answers and the reward."""

    task: str | None = None  # built-in task: brings prompts, reward and stop strings
    path: str | None = None  # .jsonl, .parquet or the name of a hub data set
    split: str = "train"  # trained on
    eval_path: str | None = None  # evaluated on instead of `path`
    eval_split: str = "test"  # evaluated on
    prompt_field: str = "prompt"  # text or chat messages
    answer_field: str | None = "answer"  # "none": the reward needs no answers
    id_field: str = "id"  # optional column; row numbers are used without it
    reward: str | None = None  # path/file.py:function or package.module:function
    max_prompt_tokens: int = 512  # longest prompt
    long_prompts: Literal["error", "skip"] = "error"  # what happens to longer ones; skipped ones are counted
    data_seed: int = 0  # order of prompts, apart from run.seed
    limit: int | None = None  # first examples used; none: all

    def __post_init__(self) -> None:
        _check_types(self, "data")
        _require_least(self, "data", 1, "max_prompt_tokens", "limit")
        _require_least(self, "data", 0, "data_seed")


@dataclass(frozen=True)
class RolloutOptions:
    """How a step's samples are generated. Every field here decides bits or tokens."""

    schedule: str = "dense"  # dense or exit:..., optionally with a catch-up
    temperature: float = 1.0  # of the logits
    max_new_tokens: int = 256  # longest response
    group_size: int = 8  # samples of one prompt
    prompts_per_step: int = 32  # over all cohorts and processes
    cohorts: int = 4  # shards of a step with a fixed identity, whatever the number of processes
    stop: tuple[str, ...] = ()  # stop strings besides the task's
    capacity: Capacity = field(default_factory=Capacity)  # of the engine that runs a cohort

    def __post_init__(self) -> None:
        _check_types(self, "rollout")
        good = 0 < self.temperature < math.inf
        _require(good, "rollout.temperature", self.temperature, "training samples, so it must be above 0; 1.0 is usual")
        _require_least(self, "rollout", 1, "max_new_tokens", "prompts_per_step", "cohorts")
        remedy = "advantages compare the samples of a prompt, so a group needs at least 2"
        _require(self.group_size >= 2, "rollout.group_size", self.group_size, remedy)
        samples = self.prompts_per_step * self.group_size
        remedy = f"a step would have {samples:,} samples, at most {MOST_SAMPLES:,}; lower it or prompts_per_step"
        _require(samples <= MOST_SAMPLES, "rollout.group_size", self.group_size, remedy)
        tokens = samples * self.max_new_tokens
        remedy = f"{samples:,} samples a step may then have {tokens:,} tokens, at most {MOST_TOKENS:,}; lower it"
        _require(tokens <= MOST_TOKENS, "rollout.max_new_tokens", self.max_new_tokens, remedy)
        remedy = f"must be a multiple of rollout.cohorts = {self.cohorts}, so that all cohorts have the same size"
        _require(self.prompts_per_step % self.cohorts == 0, "rollout.prompts_per_step", self.prompts_per_step, remedy)
        _require("" not in self.stop, "rollout.stop", self.stop, "an empty stop string would stop everywhere")


@dataclass(frozen=True)
class LearnerOptions:
    """Loss, gradient and update."""

    learning_rate: float = 1e-6  # after warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    schedule_steps: int = 0  # steps over which linear and cosine fall; 0: run.steps
    min_ratio: float = 0.0  # share of learning_rate that linear and cosine end at
    weight_decay: float = 0.0  # not on norms and biases
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW; the second shorter than 0.999, as runs are short
    eps: float = 1e-8  # of AdamW
    clip_norm: float = 1.0  # global gradient norm; inf: never clip
    clip_low: float = 0.2  # ratio is cut below 1 - clip_low
    clip_high: float = 0.2  # ratio is cut above 1 + clip_high
    kl_coefficient: float = 0.0  # of the k3 penalty against `reference`
    reference: str = "none"  # "none", "initial" (the run's first weights) or a model folder
    advantage: Literal["group", "none", "leave-one-out"] = "group"  # over the group's std, over nothing, RLOO
    denominator: Literal["tokens", "sequences"] | float = "tokens"  # token mean, mean of sequence means, a constant
    mask_truncated: bool = False  # samples cut by length give no loss; their rewards stay in the group's mean
    updates_per_rollout: int = 1  # optimizer steps an epoch; each takes the same number of whole cohorts
    epochs: int = 1  # passes over a rollout
    micro_batch_sequences: int = 8  # sequences of a packed forward and backward
    replay: Literal["audit", "always"] = "audit"  # replay a sample of cohorts, or everything
    audit_every: int = 1  # steps between audits
    audit_cohorts: int = 1  # cohorts replayed by an audit
    dense_dtype: Literal["same", "float32"] = "same"  # of the forward that gives the gradient
    recompute: bool = False  # compute each loop again in backward: less memory, same bits
    logprob_chunk: int = 1024  # rows of logits that exist at a time
    gate_objective: Literal["none"] = "none"  # the exit gate is frozen

    def __post_init__(self) -> None:
        _check_types(self, "learner")
        _require_least(self, "learner", 0, "learning_rate", "warmup_steps", "schedule_steps", "weight_decay")
        _require_least(self, "learner", 0, "clip_high", "kl_coefficient")
        _require_least(self, "learner", 1, "updates_per_rollout", "epochs", "micro_batch_sequences")
        _require_least(self, "learner", 1, "audit_every", "audit_cohorts", "logprob_chunk")
        for name in ("learning_rate", "weight_decay", "clip_high", "kl_coefficient"):
            value = getattr(self, name)
            _require(value < math.inf, f"learner.{name}", value, "must be finite")
        for index, beta in enumerate(self.betas):
            _require(0 <= beta < 1, f"learner.betas[{index}]", beta, "must lie in [0, 1)")
        _require(0 < self.eps < math.inf, "learner.eps", self.eps, "must be above 0")
        _require(self.clip_norm > 0, "learner.clip_norm", self.clip_norm, "must be above 0; inf never clips")
        _require(0 <= self.clip_low <= 1, "learner.clip_low", self.clip_low, "must lie in [0, 1]")
        _require(0 <= self.min_ratio <= 1, "learner.min_ratio", self.min_ratio, "must lie in [0, 1]")
        good = isinstance(self.denominator, str) or 0 < self.denominator < math.inf
        _require(good, "learner.denominator", self.denominator, 'use "tokens", "sequences" or a constant above 0')
        good = self.kl_coefficient == 0 or self.reference != "none"
        remedy = 'a penalty needs learner.reference = "initial" or a model folder'
        _require(good, "learner.kl_coefficient", self.kl_coefficient, remedy)
        _require(self.reference != "", "learner.reference", "", 'use "none", "initial" or a model folder')


@dataclass(frozen=True)
class RunOptions:
    """The process around the training: length, files, what is shown."""

    dir: str = "runs/train"  # run folder
    steps: int = 100  # step number of the last rollout and update
    seed: int = 0  # of sampling, apart from data.data_seed
    save_every: int = 10  # steps between checkpoints; the last step is always saved
    keep: int = 2  # checkpoints kept
    eval_every: int = 0  # steps between evaluations
    eval_samples: int = 1  # samples of a prompt in an evaluation
    eval_limit: int | None = None  # prompts of an evaluation; none: all
    log_every: int = 1  # steps between console lines and tracker entries; metrics.jsonl has every step
    resume: str = "never"  # "never", "auto" (the newest sound checkpoint in dir, if any) or a checkpoint
    trackers: tuple[str, ...] = ("tensorboard",)  # names that accelerate knows
    from_logs: str | None = None  # train from the schedule logs of this folder, without sampling
    rollout_only: bool = False  # write logs, train nothing
    threads: int = 1  # of torch in one process; part of what repeats bits

    def __post_init__(self) -> None:
        _check_types(self, "run")
        _require_least(self, "run", 1, "steps", "keep", "eval_samples", "eval_limit", "log_every", "threads")
        _require_least(self, "run", 0, "save_every", "eval_every")
        _require(self.eval_samples <= MOST_SAMPLES, "run.eval_samples", self.eval_samples, f"at most {MOST_SAMPLES:,}")
        _require(0 <= self.seed < 2**64, "run.seed", self.seed, "must lie in 0 .. 2^64 - 1")
        _require(self.dir != "", "run.dir", self.dir, "name the folder of the run")
        _require(self.resume != "", "run.resume", self.resume, 'use "never", "auto" or a checkpoint')
        good = not (self.rollout_only and self.from_logs is not None)
        _require(good, "run.rollout_only", self.rollout_only, "excludes run.from_logs; leave one of them out")


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run; checks what concerns several sections."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    learner: LearnerOptions = field(default_factory=LearnerOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self)):
            kind = kinds(TrainConfig)[name]
            assert isinstance(getattr(self, name), kind), f"{name} must be a {kind.__name__}"
        rollout, learner, data = self.rollout, self.learner, self.data
        _require(self.model.path != "", "model.path", "", "name the folder of the model to train")
        if self.run.from_logs is None:
            good = data.task is not None or data.path is not None
            _require(good, "data.path", None, "name a file or data set, or a built-in task with data.task")
            good = data.task is not None or data.reward is not None
            _require(
                good, "data.reward", None, "name a function (path/file.py:function), or a task that brings its own"
            )
        remedy = f"must divide rollout.cohorts = {rollout.cohorts}, since an update takes whole cohorts"
        good = rollout.cohorts % learner.updates_per_rollout == 0
        _require(good, "learner.updates_per_rollout", learner.updates_per_rollout, remedy)
        good = learner.audit_cohorts <= rollout.cohorts
        remedy = f"a step has only rollout.cohorts = {rollout.cohorts}"
        _require(good, "learner.audit_cohorts", learner.audit_cohorts, remedy)
        horizon = learner.schedule_steps or self.run.steps
        good = learner.schedule == "constant" or learner.warmup_steps <= horizon
        remedy = f"is longer than the schedule of {horizon} steps; lower it or raise learner.schedule_steps"
        _require(good, "learner.warmup_steps", learner.warmup_steps, remedy)
