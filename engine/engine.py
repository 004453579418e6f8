"""The rollout engine: plan, run, read out and sample, commit.

Knows no file format, task or learner. What it returns holds every decision it made, so
that a log can be written and the run replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from torch import Tensor

from engine import groups, sampler
from engine.clock import Clock, Seconds
from engine.gate import GateState
from engine.plan import Capacity, Event, Pass, Readout
from engine.runner import Runner
from engine.sampler import Sampling, is_word64, sample
from engine.schedule import Schedule, parse_schedule
from engine.scheduler import Plan, Scheduler
from engine.stopping import Stopper
from models.looped import LoopedLM
from models.numerics import dtype_name, fingerprint
from models.rule import padded


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate, at least 1.
        uid: 64-bit key of its random numbers, unique in a run.
        dataset, example, group, sample: where it comes from; carried to the log, not used.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    uid: int
    dataset: str = ""
    example: str = ""
    group: int = 0
    sample: int = 0

    @property
    def cells(self) -> int:
        """Most cells at a loop that it can come to: the last token of a full response is never run."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Completion:
    """What one request became.

    Attributes:
        token_ids: response ids, the stop id included where one fired.
        logprobs: float32 values, one a token: log softmax(logits / temperature) at the id.
        exit_depths: loop that each token was read out at.
        finish_reason: `stop` (a stop id), `stop_string` or `length`.
        stop_id: the id that fired, None otherwise.
    """

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    exit_depths: tuple[int, ...]
    finish_reason: str
    stop_id: int | None


@dataclass(frozen=True)
class Rollout:
    """One engine run: completions in request order, events in execution order, and the header.

    header: everything else that decides the bits, as plain values (`docs/schedule-log.md`).
    peak_catch_up: most older cells that one span ran for a newer position.
    keys_in_place, keys_gathered: keys that attention read where they lie, and as a copy (`Runner`).
    seconds: where the wall time went; no part of what the run is, so it is never compared or logged.
    """

    completions: tuple[Completion, ...]
    events: tuple[Event, ...]
    header: dict
    peak_catch_up: int
    keys_in_place: int
    keys_gathered: int
    seconds: Seconds = field(compare=False, repr=False)


class Engine:
    """Generates under a schedule and returns the schedule that it executed.

    Example: `Engine(model, "exit:2").generate([Request((1, 5), 16, uid=7)], Sampling())`.
    decode: token ids -> text, needed only for stop strings. synchronise: on a GPU, wait at the
    end of each phase, so that `Rollout.seconds` tells them apart (and the run takes longer).
    """

    def __init__(self, model: LoopedLM, schedule: str = "dense", capacity: Capacity | None = None, *,
                 decode: Callable[[Sequence[int]], str] | None = None, synchronise: bool = False):
        self.model = model
        self.schedule: Schedule = parse_schedule(schedule, model.config.loops)
        self.capacity = by_rule(capacity or Capacity(), model)
        self.decode = decode
        self.synchronise = synchronise

    def generate(self, requests: Sequence[Request], sampling: Sampling,
                 on_finish: Callable[[Completion], None] | None = None) -> Rollout:
        """Generate every request to its end. ValueError when one is malformed or can never fit."""
        run = _Run(self, requests, sampling, on_finish)
        while run.scheduler.busy:
            run.step()
        run.runner.cache.check_integrity()
        run.scheduler.check_integrity()
        done = tuple(run.completions[number] for number in range(len(requests)))
        header = run.clock.lap("header", self.header(sampling))
        return Rollout(done, tuple(run.events), header, run.scheduler.peak_catch_up, run.runner.keys_in_place,
                       run.runner.keys_gathered, run.clock.seconds())

    def check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """What `generate` would refuse, without generating. ValueError as there."""
        _check(requests, sampling, self.model)
        scheduler = Scheduler(self.schedule, self.capacity, sampling.seed)
        for number, request in enumerate(requests):
            scheduler.add(number, request.uid, len(request.prompt), request.max_new_tokens)

    def header(self, sampling: Sampling) -> dict:
        """What decides the bits of a run, as plain values."""
        model = self.model
        return {
            "policy_version": model.version, "weights": model.digest(),
            "family": model.config.family, "loops": model.config.loops,
            "stages": {"prelude": model.config.prelude_layers, "core": model.config.layers,
                       "coda": model.config.coda_layers},
            "vocab": model.config.vocab, "dtype": dtype_name(model.dtype),
            "profile": model.profile, **model.kernels, "fingerprint": fingerprint(model.device),
            "seed": sampling.seed, "temperature": sampling.temperature, "greedy": sampling.greedy,
            "top_k": sampling.top_k, "top_p": sampling.top_p,
            "stop_ids": list(sampling.stop_ids), "stop_strings": list(sampling.stop_strings),
            "schedule": self.schedule.text, "catch_up": "lazy", "capacity": dict(vars(self.capacity)),
            "derived": {"groups": groups.VERSION, "sampler": sampler.VERSION},
        }


class _Run:
    """State of one `generate` call. Nothing of it outlives the call, so no KV cell ever
    meets another policy version."""

    def __init__(self, engine: Engine, requests: Sequence[Request], sampling: Sampling, on_finish):
        self.clock = Clock(engine.model.device, synchronise=engine.synchronise)
        self.engine, self.sampling, self.on_finish = engine, sampling, on_finish
        self.requests = list(requests)
        self.runner = Runner(engine.model, engine.capacity)
        self.scheduler = Scheduler(engine.schedule, engine.capacity, sampling.seed)
        self.gate = (GateState(engine.schedule, engine.capacity)
                     if engine.schedule.kind == "gate" else None)
        self.stopper = Stopper(sampling, engine.decode)
        self.tokens: list[list[int]] = []  # prompt and response
        self.responses: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.depths: list[list[int]] = []
        self.events: list[Event] = []
        self.completions: dict[int, Completion] = {}
        _check(self.requests, sampling, engine.model)
        for number, request in enumerate(self.requests):
            self.scheduler.add(number, request.uid, len(request.prompt), request.max_new_tokens)
            self.tokens.append(list(request.prompt))
            self.responses.append([])
            self.logprobs.append([])
            self.depths.append([])
        self.clock.lap("start")

    def step(self) -> None:
        """One pass: plan, run, read out and sample, commit. `lap` only watches."""
        lap = self.clock.lap
        self.admit()
        plan = lap("plan", self.scheduler.plan())
        hidden = lap("passes", self.runner.run(plan.spans, self.input_tokens(plan)))
        readouts = lap("gate", self.decide(plan, hidden))
        self.commit(plan, readouts, self.draw(readouts, hidden))
        self.clock.end_pass()

    def admit(self) -> None:
        while self.scheduler.can_admit():
            event = self.scheduler.admit()
            self.runner.admit(event.sequence, self.requests[event.sequence].cells)
            self.events.append(event)

    def input_tokens(self, plan: Plan) -> list[int]:
        return [token for number, loop, start, stop in plan.spans if loop == 1
                for token in self.tokens[number][start:stop]]

    def decide(self, plan: Plan, hidden: Tensor) -> tuple[Readout, ...]:
        """Which newest positions are read out after this pass; the gate decides here."""
        self.scheduler.advance(plan.spans)
        if self.gate is not None and plan.candidates:
            rows = [row for _, row in plan.candidates]
            spans = [plan.spans[index] for index, _ in plan.candidates]
            slots = [self.runner.cache.slots[span.sequence] for span in spans]
            leave = self.gate.leaving(self.engine.model.gate(hidden[rows]), slots,
                                      [span.loop for span in spans])
            for span, leaves in zip(spans, leave, strict=True):
                if leaves:
                    self.scheduler.exit_here(span.sequence, span.loop)
        return tuple(
            Readout(row, number, stop - 1, loop) for index, row in plan.candidates
            for number, loop, _, stop in [plan.spans[index]]
            if self.scheduler.active[number].depth == loop)

    def draw(self, readouts: tuple[Readout, ...], hidden: Tensor) -> list[tuple[int, float]]:
        if not readouts:
            return []
        logits = self.clock.lap("head", self.runner.read_out(hidden[[r.row for r in readouts]]))
        ids, logprobs = sample(logits, self.sampling,
                               [self.requests[r.sequence].uid for r in readouts],
                               [r.position for r in readouts])
        return self.clock.lap("sampling", list(zip(ids.tolist(), logprobs.tolist(), strict=True)))

    def commit(self, plan: Plan, readouts: tuple[Readout, ...], drawn: list[tuple[int, float]]) -> None:
        capacity = self.engine.capacity
        self.events.append(Pass(plan.spans, padded(plan.rows, capacity.row_multiple), readouts,
                                padded(len(readouts), capacity.head_multiple)))
        for readout, (token, logprob) in zip(readouts, drawn, strict=True):
            number = readout.sequence
            self.tokens[number].append(token)
            self.responses[number].append(token)
            self.logprobs[number].append(logprob)
            self.depths[number].append(readout.loop)
            reason = self.stopper.reason(self.responses[number], self.requests[number].max_new_tokens)
            if reason is None:
                self.scheduler.append(number)
            else:
                self.finish(number, reason)

    def finish(self, number: int, reason: str) -> None:
        response = self.responses[number]
        self.events.append(self.scheduler.finish(number))
        self.runner.release(number)
        self.completions[number] = Completion(
            self.requests[number], tuple(response), tuple(self.logprobs[number]),
            tuple(self.depths[number]), reason, response[-1] if reason == "stop" else None)
        if self.on_finish is not None:
            self.on_finish(self.completions[number])


def by_rule(capacity: Capacity, model: LoopedLM) -> Capacity:
    """The capacity with row counts padded as the model's shape rule asks, if it keeps one."""
    rule = model.rule
    if rule is None:
        return capacity
    return replace(capacity, row_multiple=lcm(capacity.row_multiple, rule.rows),
                   head_multiple=lcm(capacity.head_multiple, rule.head_rows))


def _check(requests: Sequence[Request], sampling: Sampling, model: LoopedLM) -> None:
    config = model.config
    wrong = next((i for i in sampling.stop_ids if i >= config.vocab), None)
    if wrong is not None:
        raise ValueError(f"stop_ids holds {wrong}, outside the vocabulary of {config.vocab}: it could "
                         "never fire")
    seen: dict[int, int] = {}
    for number, request in enumerate(requests):
        _check_request(request, number, model)
        if seen.setdefault(request.uid, number) != number:
            raise ValueError(f"request {number}: uid = {request.uid} is that of request "
                             f"{seen[request.uid]} too; both would draw the same random numbers")


def _check_request(request: Request, number: int, model: LoopedLM) -> None:
    config = model.config
    prompt, new = len(request.prompt), request.max_new_tokens
    if not prompt:
        raise ValueError(f"request {number}: the prompt is empty; give at least one token")
    wrong = next((i for i in request.prompt if not is_word64(i) or i >= config.vocab), None)
    if wrong is not None:
        raise ValueError(f"request {number}: token id {wrong!r} is no integer within the vocabulary "
                         f"of {config.vocab}")
    if not is_word64(new) or new < 1:
        raise ValueError(f"request {number}: max_new_tokens = {new!r} must be an integer of at least 1")
    if prompt + new > config.max_positions:
        raise ValueError(f"request {number}: {prompt} prompt + {new} new tokens exceed max_positions "
                         f"= {config.max_positions} of the model")
    if model.rule is not None and prompt + new > model.rule.length:
        raise ValueError(f"request {number}: {prompt} prompt + {new} new tokens; numerics invariant were tried up to "
                         f"{model.rule.length}: set them for a greater length")
    if not is_word64(request.uid):
        raise ValueError(f"request {number}: uid = {request.uid!r} must be an integer in 0..2^64-1")
