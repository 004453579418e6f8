"""Arms of a benchmark: engine runs taken in turns, and the figures that come out of them.

Every turn runs each arm once, in an order that rotates and turns round, so that a slow moment of
the machine and whatever an arm leaves in the caches hit all of them. A ratio is taken within
a turn; figures are medians over turns, with the least and the most beside them. With several
ranks all of them run the same arm at the same time and their rates are added up.
"""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from engine.clock import PHASES, Seconds
from engine.engine import Engine, Request, Rollout
from engine.sampler import Sampling
from engine.schedule import parse_schedule
from models.looped import LoopedLM
from rollout.bench_ranks import Ranks
from rollout.generate import choose_capacity
from rollout.log import encode, from_rollout
from rollout.statistics import Statistics, decoding, statistics

# What the phases of a run are called in a report; `log` is joined by the encoding of the log.
SHARES = {"passes": ("passes",), "head": ("head",), "sampling": ("sampling",),
          "scheduling": ("plan", "gate", "commit"), "log": ("header",), "start": ("start",)}


@dataclass(frozen=True)
class Workload:
    """What every arm of one batch size generates.

    Attributes:
        batch: sequences of one rank, all in the engine at once.
        prompt, new: tokens of each prompt and response; nothing stops a response early.
        turns: measured turns; one more before them warms up.
        sampling: of the first turn; turn i draws with seed + i.
        synchronise: see `Engine`.
    """

    batch: int
    prompt: int
    new: int
    turns: int
    sampling: Sampling
    synchronise: bool = False

    def requests(self, vocab: int, rank: int = 0) -> list[Request]:
        """The requests of one rank: the prompts of all ranks are the same, the random numbers are not."""
        return [Request(tuple((31 * i + 17 * j) % vocab for j in range(self.prompt)), self.new,
                        uid=rank * self.batch + i) for i in range(self.batch)]

    def sampling_of(self, turn: int) -> Sampling:
        """How tokens are drawn in a turn."""
        return replace(self.sampling, seed=self.sampling.seed + turn)


@dataclass(frozen=True)
class Arm:
    """A schedule on a linear operator.

    Attributes:
        place: of the schedule among those measured; a schedule may be named twice.
        schedule: as it was named. engine: on a model with that operator.
    """

    place: int
    schedule: str
    engine: Engine

    @property
    def linear(self) -> str:
        """The linear operator."""
        return self.engine.model.linear


@dataclass(frozen=True)
class Turn:
    """One engine run of one arm on one rank.

    Attributes:
        counts: of what it executed. seconds: of `Engine.generate`, by phase.
        encode: seconds to make the bytes of its log.
        decode_tokens, decode_seconds: those after the pass that read out the last sequence's first
            token (`rollout.statistics.decoding`). decode_passes, decode_ran: passes since then, and
            their own seconds.
        keys_in_place, keys_gathered: see `Rollout`.
    """

    counts: Statistics
    seconds: Seconds
    encode: float
    decode_tokens: int
    decode_seconds: float
    decode_passes: int
    decode_ran: float
    keys_in_place: int
    keys_gathered: int

    @property
    def rate(self) -> float:
        """Response tokens a second of the whole run, prompts included, encoding of the log not."""
        return self.counts.tokens / self.seconds.total

    @property
    def decode_rate(self) -> float:
        """Response tokens a second after the prompts; nan where no token is left."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else float("nan")


def make_arms(models: Sequence[LoopedLM], schedules: Sequence[str], load: Workload) -> list[Arm]:
    """Every schedule on every model; the capacity is what `rollout.generate` would choose."""
    arms = []
    for place, schedule in enumerate(schedules):
        for model in models:
            depth = parse_schedule(schedule, model.config.loops).max_depth
            capacity = choose_capacity(load.requests(model.config.vocab), depth, {"max_sequences": load.batch})
            arms.append(Arm(place, schedule, Engine(model, schedule, capacity, synchronise=load.synchronise)))
    return arms


def rotated(items: Sequence, turn: int) -> list:
    """`items` in their order of a turn: every second turn starts with the next one, the turn between
    runs that order backwards, so that no item always follows the same other one."""
    first = turn // 2 % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if turn % 2 else order


def run_turns(arms: Sequence[Arm], load: Workload, ranks: Ranks) -> tuple[list[list[Turn]], Rollout]:
    """The measured turns of each arm on this rank, and the last run of the first arm."""
    found: list[list[Turn]] = [[] for _ in arms]
    for turn in range(-1, load.turns):  # the first one warms up
        for index in rotated(range(len(arms)), turn):
            ranks.barrier()
            rollout = run(arms[index].engine, load, turn, ranks.rank)
            if turn >= 0:
                found[index].append(turn_of(rollout))
            if index == 0:
                kept = rollout
    return found, kept


def run(engine: Engine, load: Workload, turn: int, rank: int = 0) -> Rollout:
    """One engine run of a turn; the one that warms up (-1) draws as turn 0 does."""
    return engine.generate(load.requests(engine.model.config.vocab, rank), load.sampling_of(max(turn, 0)))


def turn_of(rollout: Rollout) -> Turn:
    """The figures of a run; its log is encoded here, as `rollout/log.py` does before writing."""
    began = time.perf_counter()
    encode(from_rollout(rollout))
    encoding = time.perf_counter() - began
    passes, tokens = decoding(rollout)
    ends, ran = rollout.seconds.ends, rollout.seconds.ran
    return Turn(statistics(rollout), rollout.seconds, encoding, tokens, ends[-1] - ends[passes - 1],
                len(ends) - passes, ran[-1] - ran[passes - 1], rollout.keys_in_place, rollout.keys_gathered)


def rows(arms: Sequence[Arm], load: Workload, by_rank: Sequence[Sequence[Sequence[Turn]]]) -> list[dict]:
    """One row of figures an arm. by_rank: [rank][arm][turn].

    The base is the first `dense` schedule on its fastest linear operator, the one with the higher
    median rate. `fastest` marks the operator on which an arm's schedule is fastest.
    """
    rates = [_sums(by_rank, index, lambda turn: turn.rate) for index in range(len(arms))]
    medians = [stats.median(found) for found in rates]
    fastest: dict[int, int] = {}
    for index, arm in enumerate(arms):
        if medians[index] > medians[fastest.setdefault(arm.place, index)]:
            fastest[arm.place] = index
    base = fastest[next(arm.place for arm in arms if arm.schedule == "dense")]
    found = []
    for index, arm in enumerate(arms):
        turns = [turn for of_rank in by_rank for turn in of_rank[index]]
        ratios = [rate / dense for rate, dense in zip(rates[index], rates[base], strict=True)]
        found.append({
            "schedule": arm.schedule, "arm": arm.place, "batch": load.batch, "linear": arm.linear,
            "numerics": arm.engine.model.numerics, "fastest": fastest[arm.place] == index,
            "dense_linear": arms[base].linear, **spread("tokens_per_s", rates[index]),
            **spread("decode_tokens_per_s", _sums(by_rank, index, lambda turn: turn.decode_rate)),
            **spread("ratio_to_dense", ratios), **_counts(turns, load.turns), **_shares(turns)})
    return found


def _sums(by_rank: Sequence, index: int, value: Callable[[Turn], float]) -> list[float]:
    """`value` of an arm in each turn, added up over ranks."""
    return [sum(map(value, at_once)) for at_once in zip(*(of_rank[index] for of_rank in by_rank), strict=True)]


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The median of a figure over turns, with the least and the most beside it; None where a value is nan."""
    if any(value != value for value in values):  # nothing was decoded
        return {name: None, f"{name}_least": None, f"{name}_most": None}
    return {name: stats.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}


def _counts(turns: Sequence[Turn], count: int) -> dict[str, float]:
    """Counts over all measured turns and ranks; catch-up rows are those of one turn of all ranks."""
    whole = reduce(add, (turn.counts for turn in turns))
    gathered = sum(turn.keys_gathered for turn in turns)
    return {"passes_per_token": whole.passes_per_token, "rows_per_pass": whole.rows_per_pass,
            "padded_rows_per_pass": whole.padded_rows / whole.passes,
            "catch_up_rows": whole.catch_up_rows / count, "catch_up_share": whole.catch_up_rows / whole.rows,
            "peak_catch_up": whole.peak_catch_up,
            "gathered_share": gathered / (gathered + sum(turn.keys_in_place for turn in turns))}


def _shares(turns: Sequence[Turn]) -> dict[str, float | dict[str, float]]:
    """Shares of the wall time of all measured turns and ranks, the encoding of the logs included."""
    spent = {phase: sum(getattr(turn.seconds, phase) for turn in turns) for phase in PHASES}
    encoding = sum(turn.encode for turn in turns)
    total = sum(spent.values()) + encoding
    shares = {name: sum(spent[phase] for phase in phases) / total for name, phases in SHARES.items()}
    shares["log"] += encoding / total
    return {"shares": shares, "outside_share": 1 - shares["passes"]}
