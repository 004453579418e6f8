"""The rollout engine: plan, run, read out and sample, commit.

Knows no file format, task or learner. What it returns holds every decision it made, so
that a log can be written and the run replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import groups, sampler
from engine.gate import GateState
from engine.plan import Capacity, Event, Pass, Readout, padded
from engine.runner import Runner
from engine.sampler import Sampling, sample
from engine.schedule import Schedule, parse_schedule
from engine.scheduler import Plan, Scheduler
from engine.stopping import Stopper
from models.looped import LoopedLM
from models.numerics import dtype_name, fingerprint


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
    """

    completions: tuple[Completion, ...]
    events: tuple[Event, ...]
    header: dict
    peak_catch_up: int


class Engine:
    """Generates under a schedule and returns the schedule that it executed.

    Example: `Engine(model, "exit:2").generate([Request((1, 5), 16, uid=7)], Sampling())`.
    decode: token ids -> text, needed only for stop strings.
    """

    def __init__(self, model: LoopedLM, schedule: str = "dense", capacity: Capacity | None = None, *,
                 decode: Callable[[Sequence[int]], str] | None = None):
        self.model = model
        self.schedule: Schedule = parse_schedule(schedule, model.config.loops)
        self.capacity = capacity or Capacity()
        self.decode = decode

    def generate(self, requests: Sequence[Request], sampling: Sampling,
                 on_finish: Callable[[Completion], None] | None = None) -> Rollout:
        """Generate every request to its end. ValueError when one is malformed or can never fit."""
        run = _Run(self, requests, sampling, on_finish)
        while run.scheduler.busy:
            run.step()
        done = tuple(run.completions[number] for number in range(len(requests)))
        return Rollout(done, tuple(run.events), self.header(sampling), run.scheduler.peak_catch_up)

    def header(self, sampling: Sampling) -> dict:
        """What decides the bits of a run, as plain values."""
        model = self.model
        return {
            "policy_version": model.version, "weights": model.digest(),
            "family": model.config.family, "loops": model.config.loops,
            "stages": {"prelude": model.config.prelude_layers, "core": model.config.layers,
                       "coda": model.config.coda_layers},
            "vocab": model.config.vocab, "dtype": dtype_name(model.dtype),
            "profile": model.profile, "numerics": "shapes", "linear": "native",
            "attention": model.kernel, "fingerprint": fingerprint(model.device),
            "seed": sampling.seed, "temperature": sampling.temperature, "greedy": sampling.greedy,
            "stop_ids": list(sampling.stop_ids), "stop_strings": list(sampling.stop_strings),
            "schedule": self.schedule.text, "catch_up": "lazy", "capacity": dict(vars(self.capacity)),
            "derived": {"groups": groups.VERSION, "sampler": sampler.VERSION},
        }


class _Run:
    """State of one `generate` call. Nothing of it outlives the call, so no KV cell ever
    meets another policy version."""

    def __init__(self, engine: Engine, requests: Sequence[Request], sampling: Sampling, on_finish):
        self.engine, self.sampling, self.on_finish = engine, sampling, on_finish
        self.requests = list(requests)
        self.runner = Runner(engine.model, engine.capacity)
        self.scheduler = Scheduler(engine.schedule, engine.capacity, sampling.seed)
        self.gate = (GateState(engine.schedule, engine.capacity, engine.model.device)
                     if engine.schedule.kind == "gate" else None)
        self.stopper = Stopper(sampling, engine.decode)
        self.tokens: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.depths: list[list[int]] = []
        self.events: list[Event] = []
        self.completions: dict[int, Completion] = {}
        for number, request in enumerate(self.requests):
            _check(request, number, engine.model)
            self.scheduler.add(number, request.uid, len(request.prompt), request.max_new_tokens)
            self.tokens.append(list(request.prompt))
            self.logprobs.append([])
            self.depths.append([])

    def step(self) -> None:
        """One pass: plan, run, read out and sample, commit."""
        self.admit()
        plan = self.scheduler.plan()
        hidden = self.runner.run(plan.spans, self.input_tokens(plan))
        readouts = self.decide(plan, hidden)
        self.commit(plan, readouts, self.draw(readouts, hidden))

    def admit(self) -> None:
        while self.scheduler.can_admit():
            event = self.scheduler.admit()
            self.runner.admit(event.sequence)
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
            for span, leaves in zip(spans, leave):
                if leaves:
                    self.scheduler.exit_here(span.sequence, span.loop)
        return tuple(
            Readout(row, number, stop - 1, loop) for index, row in plan.candidates
            for number, loop, _, stop in [plan.spans[index]]
            if self.scheduler.active[number].depth == loop)

    def draw(self, readouts: tuple[Readout, ...], hidden: Tensor) -> list[tuple[int, float]]:
        if not readouts:
            return []
        logits = self.runner.read_out(hidden[[r.row for r in readouts]])
        ids, logprobs = sample(logits, self.sampling,
                               [self.requests[r.sequence].uid for r in readouts],
                               [r.position for r in readouts])
        return list(zip(ids.tolist(), logprobs.tolist()))

    def commit(self, plan: Plan, readouts: tuple[Readout, ...], drawn: list[tuple[int, float]]) -> None:
        capacity = self.engine.capacity
        self.events.append(Pass(plan.spans, padded(plan.rows, capacity.row_multiple), readouts,
                                padded(len(readouts), capacity.head_multiple)))
        for readout, (token, logprob) in zip(readouts, drawn):
            number = readout.sequence
            request = self.requests[number]
            self.tokens[number].append(token)
            self.logprobs[number].append(logprob)
            self.depths[number].append(readout.loop)
            response = self.tokens[number][len(request.prompt):]
            reason = self.stopper.reason(response, request.max_new_tokens)
            if reason is None:
                self.scheduler.append(number)
            else:
                self.finish(number, response, reason)

    def finish(self, number: int, response: list[int], reason: str) -> None:
        self.events.append(self.scheduler.finish(number))
        self.runner.release(number)
        self.completions[number] = Completion(
            self.requests[number], tuple(response), tuple(self.logprobs[number]),
            tuple(self.depths[number]), reason, response[-1] if reason == "stop" else None)
        if self.on_finish is not None:
            self.on_finish(self.completions[number])


def _check(request: Request, number: int, model: LoopedLM) -> None:
    config = model.config
    if not request.prompt:
        raise ValueError(f"request {number}: the prompt is empty; give at least one token")
    wrong = next((i for i in request.prompt if not 0 <= i < config.vocab), None)
    if wrong is not None:
        raise ValueError(f"request {number}: token id {wrong} is outside the vocabulary of "
                         f"{config.vocab}")
    if request.max_new_tokens < 1:
        raise ValueError(f"request {number}: max_new_tokens = {request.max_new_tokens} must be at "
                         "least 1")
    if len(request.prompt) + request.max_new_tokens > config.max_positions:
        raise ValueError(f"request {number}: {len(request.prompt)} prompt + {request.max_new_tokens} "
                         f"new tokens exceed max_positions = {config.max_positions} of the model")
    if not 0 <= request.uid < 2**64:
        raise ValueError(f"request {number}: uid = {request.uid} must be in 0..2^64-1")
