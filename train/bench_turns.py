"""The turns of `train.bench`: one training step of each numerics mode, taken cohort by cohort in turns.

A ratio is taken within a turn; figures are medians over turns, with the least and the most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.engine import Engine, Request
from engine.sampler import Sampling
from models.looped import LoopedLM
from rollout.bench_arms import rotated, spread
from rollout.collect import LOG_FILE, Prompt, requests_of
from rollout.data import Example
from rollout.log import ScheduleLog, from_rollout, write_log
from rollout.statistics import Statistics, statistics
from train.learner import PHASES as LEARNER_PHASES
from train.learner import Batch, Learner
from train.replay import mismatches, recorded, replay, replay_packed

PHASES = ("rollout", "log", "replay", "dense", "reduction", "optimizer", "publication", "other")
REPLAYS = {"passes": replay, "packed": replay_packed}


@dataclass(frozen=True)
class Job:
    """What both modes do in every turn.

    Attributes:
        prompts: token ids of each prompt. group: samples of a prompt. new: tokens of each sample.
        cohorts: divides the number of prompts. sampling: of all turns; uids hold the step.
    """

    prompts: tuple[tuple[int, ...], ...]
    group: int
    new: int
    cohorts: int
    sampling: Sampling

    def requests(self, step: int) -> list[list[Request]]:
        """The requests of each cohort of a training step, as training would make them."""
        prompts = [Prompt(Example(str(i), "", "", {}), ids, i) for i, ids in enumerate(self.prompts)]
        share = len(prompts) // self.cohorts
        return [requests_of(prompts[at:at + share], step=step, dataset="bench", group_size=self.group,
                            max_new_tokens=self.new) for at in range(0, len(prompts), share)]


@dataclass(frozen=True)
class Mode:
    """A numerics mode: an engine and a learner on one model, which keeps a rule or does not."""

    engine: Engine
    learner: Learner

    @property
    def model(self) -> LoopedLM:
        """The compute copy of both."""
        return self.learner.model


@dataclass(frozen=True)
class Turn:
    """One training step of one mode; seconds are those of all its cohorts.

    Attributes:
        counts: of the rollout. rollout, alone: seconds of the rollout, and of its passes alone.
        replay: seconds of each kind of replay that has the bits. step: seconds of each phase.
    """

    counts: Statistics
    rollout: float
    alone: float
    replay: dict[str, float]
    step: dict[str, float]


@dataclass(frozen=True)
class Sampled:
    """A cohort: its log, seconds of rollout, of its passes alone, and of making the log."""

    log: ScheduleLog
    rollout: float
    alone: float
    logging: float


def run_turns(modes: Sequence[Mode], job: Job, count: int) -> list[list[Turn]]:
    """The measured turns of each mode; one more before them warms up."""
    found: list[list[Turn]] = [[] for _ in modes]
    with TemporaryDirectory() as folder:
        for turn in range(-1, count):
            done = run_turn(modes, job, turn, Path(folder))
            if turn >= 0:
                for kept, one in zip(found, done, strict=True):
                    kept.append(one)
    return found


def run_turn(modes: Sequence[Mode], job: Job, turn: int, folder: Path) -> list[Turn]:
    """One training step of each mode. Who begins changes from cohort to cohort and from turn to turn."""
    step = turn + 2  # steps count from 1
    sampled: list[list[Sampled]] = [[] for _ in modes]
    replayed: list[list[dict[str, float]]] = [[] for _ in modes]
    for cohort, requests in enumerate(job.requests(step)):
        order = rotated(range(len(modes)), turn * job.cohorts + cohort)
        for index in order:
            sampled[index].append(sample(modes[index].engine, requests, job.sampling, folder))
        for index in order:
            replayed[index].append(replays(modes[index].model, sampled[index][-1].log))
    learned = {index: learn(modes[index].learner, [cohort.log for cohort in sampled[index]], step)
               for index in rotated(range(len(modes)), turn)}
    return [_turn(sampled[index], replayed[index], learned[index]) for index in range(len(modes))]


def _turn(cohorts: Sequence[Sampled], replayed: Sequence[dict[str, float]], learned: dict[str, float]) -> Turn:
    rollout, logging = (sum(getattr(cohort, name) for cohort in cohorts) for name in ("rollout", "logging"))
    step = {"rollout": rollout, "log": logging + learned["digest"]}
    return Turn(reduce(add, (statistics(cohort.log) for cohort in cohorts)), rollout,
                sum(cohort.alone for cohort in cohorts),
                {kind: sum(one[kind] for one in replayed) for kind in replayed[0]},
                {phase: step[phase] if phase in step else learned[phase] for phase in PHASES})


def sample(engine: Engine, requests: Sequence[Request], sampling: Sampling, folder: Path) -> Sampled:
    """Roll one cohort out and write its log."""
    rollout = engine.generate(requests, sampling)
    began = time.perf_counter()
    log = from_rollout(rollout)
    write_log(log, folder / LOG_FILE)
    writing, seconds = time.perf_counter() - began, rollout.seconds
    return Sampled(log, seconds.total - seconds.header, seconds.passes, seconds.header + writing)


def replays(model: LoopedLM, log: ScheduleLog) -> dict[str, float]:
    """Seconds of every kind of replay that has the bits. RuntimeError where one has not."""
    found, wanted = {}, recorded(log)
    for kind in REPLAYS if model.rule is not None else ("passes",):
        began = time.perf_counter()
        value = REPLAYS[kind](model, log, same_weights=False)  # hashing weights is counted under `log`
        found[kind] = time.perf_counter() - began
        if wrong := len(mismatches(value, wanted)):
            raise RuntimeError(f"numerics {model.numerics}: replay ({kind}) differs from the rollout in {wrong} of "
                               f"{log.token_count} tokens")
    return found


def learn(learner: Learner, logs: Sequence[ScheduleLog], step: int) -> dict[str, float]:
    """Seconds of a learner's step by phase. A uid is a hash: its last bit is an advantage's random sign."""
    batches = [Batch(index, log, tuple(1.0 if c.request.uid % 2 else -1.0 for c in log.completions),
                     (True,) * len(log.completions)) for index, log in enumerate(logs)]
    began = time.perf_counter()
    row = learner.step(batches, step)
    total = time.perf_counter() - began
    found = {phase: row[f"seconds/{phase}"] for phase in LEARNER_PHASES}
    return found | {"other": total - sum(found.values())}


def result(model: LoopedLM, turns: Sequence[Turn]) -> dict:
    """The figures of one mode. Counts are those of one turn, in the mean."""
    whole, count = reduce(add, (turn.counts for turn in turns)), len(turns)
    total = sum(sum(turn.step.values()) for turn in turns)
    phases = [{"phase": phase, **spread("s", [turn.step[phase] for turn in turns]),
               "percent": 100 * sum(turn.step[phase] for turn in turns) / total} for phase in PHASES]
    ratios = {f"{kind}_to_rollout": [turn.replay.get(kind, float("nan")) / turn.rollout for turn in turns]
              for kind in REPLAYS}
    return {"numerics": model.numerics, "linear": model.linear, "sequences": whole.sequences // count,
            "prompt_tokens": whole.prompt_tokens // count, "tokens": whole.tokens // count,
            "passes": whole.passes / count, "rows_per_pass": whole.rows_per_pass,
            "padded_rows_per_pass": whole.padded_rows / whole.passes, "mean_depth": whole.mean_depth,
            **spread("rollout_s", [turn.rollout for turn in turns]),
            **spread("ms_per_pass", [1000 * turn.rollout / turn.counts.passes for turn in turns]),
            **spread("alone_ms", [1000 * turn.alone / turn.counts.passes for turn in turns]),
            **{name: value for kind, values in ratios.items() for name, value in spread(kind, values).items()},
            **spread("step_s", [sum(turn.step.values()) for turn in turns]), "phases": phases}


def cost_of_rule(shapes: Sequence[Turn], invariant: Sequence[Turn]) -> dict[str, float]:
    """Invariant over shapes, turn by turn: the whole rollout, a pass of it, and a pass itself."""
    pairs = list(zip(shapes, invariant, strict=True))
    return {**spread("rollout", [kept.rollout / free.rollout for free, kept in pairs]),
            **spread("pass", [kept.rollout / kept.counts.passes / (free.rollout / free.counts.passes)
                              for free, kept in pairs]),
            **spread("alone", [kept.alone / kept.counts.passes / (free.alone / free.counts.passes)
                               for free, kept in pairs])}
