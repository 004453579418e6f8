"""Replay: execute a logged schedule again, with the logged tokens and without sampling.

The result has the bits of the rollout as long as weights and process agree with the log.
The recorded log-probs are never read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.plan import Admit, Capacity, Pass
from engine.runner import Runner
from models.logprob import token_logprob
from models.looped import LoopedLM
from models.numerics import dtype_name, fingerprint
from rollout.log import ScheduleLog
from train.dense import dense_values
from train.redraw import Redraw


@dataclass(frozen=True)
class Replayed:
    """Log-probs of the response tokens of a log.

    values: float32 [tokens], sequence after sequence. starts: first index of each sequence in
    `values`, plus the total at the end. redrawn: bool [tokens], whether drawing again gave the
    logged token at the logged depth (`train/redraw.py`); None unless asked for.
    """

    values: Tensor
    starts: tuple[int, ...]
    redrawn: Tensor | None = None


def recorded(log: ScheduleLog) -> Replayed:
    """The log-probs that the rollout wrote down, in the same form."""
    values = torch.tensor([p for c in log.completions for p in c.logprobs], dtype=torch.float32)
    return Replayed(values, starts(log))


def starts(log: ScheduleLog) -> tuple[int, ...]:
    """Where each sequence's tokens begin in a flat vector of all response tokens."""
    found = [0]
    for completion in log.completions:
        found.append(found[-1] + len(completion.token_ids))
    return tuple(found)


def check_process(device: torch.device, made_with: Mapping[str, str | int], what: str = "the log") -> None:
    """RuntimeError naming the first setting or library version that differs from those that `what` was made with."""
    here = fingerprint(device)
    names = sorted({*here, *made_with}, key=lambda name: (name not in ("device", "threads"), name))
    for name in names:
        if here.get(name) != made_with.get(name):
            raise RuntimeError(f"{what} was made with {name} = {made_with.get(name)!r}, this process has "
                               f"{here.get(name)!r}: bits would differ")


def check_contract(model: LoopedLM, log: ScheduleLog, *, same_weights: bool = True) -> None:
    """RuntimeError naming the first field in which model or process differ from the log.

    same_weights = False allows other weights (a reference, a later policy version).
    """
    header = log.header
    config = model.config
    here = {"family": config.family, "loops": config.loops, "vocab": config.vocab,
            "stages": {"prelude": config.prelude_layers, "core": config.layers, "coda": config.coda_layers},
            "dtype": dtype_name(model.dtype), "profile": model.profile, **model.kernels}
    for name, value in here.items():
        if header[name] != value:
            raise RuntimeError(f"the log was made with {name} = {header[name]!r}, the model has "
                               f"{value!r}")
    check_process(model.device, header["fingerprint"])
    digest = model.digest() if same_weights else header["weights"]
    if digest != header["weights"]:
        raise RuntimeError("the log was made by another model: its weights have digest "
                           f"{header['weights'][:16]}..., these have {digest[:16]}...")


def replay(model: LoopedLM, log: ScheduleLog, *, same_weights: bool = True,
           redraw: bool = False) -> Replayed:
    """Log-probs of every response token under `model`, by the logged passes.

    redraw: also draw every token and gate exit again. The events of a log from a file must
    have passed `rollout.structure`. Errors: RuntimeError when model or process differ from the
    log (`check_contract`), or when a token is not read out exactly once.
    """
    check_contract(model, log, same_weights=same_weights)
    runner = Runner(model, Capacity(**log.header["capacity"]))
    tokens = [c.request.prompt + c.token_ids for c in log.completions]
    first = starts(log)
    parts, places = [], []

    def place(sequence: int, position: int) -> int:
        return first[sequence] + position + 1 - len(log.completions[sequence].request.prompt)

    redrawing = Redraw(log, runner, place) if redraw else None
    for event in log.events:
        if isinstance(event, Admit):
            runner.admit(event.sequence, log.completions[event.sequence].request.cells)
        elif isinstance(event, Pass):
            inputs = [token for number, loop, start, stop in event.spans if loop == 1
                      for token in tokens[number][start:stop]]
            hidden, logits = runner.run(event.spans, inputs), None
            if event.readouts:
                logits = runner.read_out(hidden[[r.row for r in event.readouts]])
                ids = torch.tensor([tokens[r.sequence][r.position + 1] for r in event.readouts],
                                   device=logits.device)
                parts.append(token_logprob(logits, ids, log.header["temperature"]))
                places += [place(r.sequence, r.position) for r in event.readouts]
            if redrawing is not None:
                redrawing.compare(event, hidden, logits)
        else:
            runner.release(event.sequence)
    if sorted(places) != list(range(first[-1])):
        raise RuntimeError(f"the log has {first[-1]} response tokens but {len(places)} read-outs, or "
                           "one token is read out twice")
    values = torch.empty(first[-1], dtype=torch.float32)
    if parts:
        values[torch.tensor(places)] = torch.cat(parts).to(torch.float32).cpu()
    return Replayed(values, first, redrawing.same if redrawing is not None else None)


def replay_packed(model: LoopedLM, log: ScheduleLog, *, same_weights: bool = True) -> Replayed:
    """Log-probs of every response token by dense forwards over whole sequences, read out at the logged depths.

    Under numerics `invariant` they have the bits of the passes. Errors: RuntimeError as `replay`,
    and for a log of numerics `shapes`, whose bits need its passes.
    """
    check_contract(model, log, same_weights=same_weights)
    if model.rule is None:
        raise RuntimeError("the log's numerics are shapes, its bits need its passes: replay it as passes")
    return Replayed(dense_values(model, log.completions, log.header["temperature"]), starts(log))


def replay_cheapest(model: LoopedLM, log: ScheduleLog, *, same_weights: bool = True) -> Replayed:
    """The replay that costs least and has the bits: packed under `invariant`, else by passes."""
    run = replay if model.rule is None else replay_packed
    return run(model, log, same_weights=same_weights)


def mismatches(found: Replayed, wanted: Replayed) -> Tensor:
    """Indices of the tokens whose bits differ, int64."""
    return torch.nonzero(found.values.view(torch.int32) != wanted.values.view(torch.int32))[:, 0]


def locate(log: ScheduleLog, index: int) -> tuple[int, int]:
    """(sequence, position of the token in prompt + response) of a flat token index."""
    first = starts(log)
    number = next(i for i in range(len(first) - 1) if index < first[i + 1])
    return number, len(log.completions[number].request.prompt) + index - first[number]
