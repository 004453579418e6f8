"""Decide again, from replayed tensors, what the rollout decided: tokens and gate exits.

Equal log-probs prove that the logged tokens got the logged values, not that the sampler drew
them. The noise of a token is a function of (seed, uid, position), so it can be drawn again; the
gate likewise. Knows no recorded log-prob.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.gate import GateState
from engine.plan import Pass
from engine.runner import Runner
from engine.sampler import Sampling, sample
from engine.schedule import parse_schedule
from rollout.log import ScheduleLog


class Redraw:
    """Compares decisions pass by pass while a log is replayed.

    same: bool [tokens], sequence after sequence; False where the seed, uid and replayed logits
    give another token, or the replayed gate another exit depth. Depths of the other schedules
    follow from integers, and `rollout.structure` checks them.
    """

    def __init__(self, log: ScheduleLog, runner: Runner, place: Callable[[int, int], int]):
        """place(sequence, position of the row read out) -> index into `same`."""
        header = log.header
        self.log, self.runner, self.place = log, runner, place
        self.sampling = Sampling(**{name: header[name] for name in (
            "seed", "temperature", "greedy", "top_k", "top_p")})
        schedule = parse_schedule(header["schedule"], header["loops"])
        self.gate = (GateState(schedule, runner.capacity)
                     if schedule.kind == "gate" else None)
        self.tokens = [len(c.request.prompt) for c in log.completions]  # of each sequence so far
        self.same = torch.ones(log.token_count, dtype=torch.bool)

    def compare(self, event: Pass, hidden: Tensor, logits: Tensor | None) -> None:
        """hidden [R, H] after the pass, logits [N, V] of its read-outs (None without any)."""
        if self.gate is not None:
            self._compare_exits(event, hidden)
        if logits is None:
            return
        completions, readouts = self.log.completions, event.readouts
        ids, _ = sample(logits, self.sampling,
                        [completions[r.sequence].request.uid for r in readouts],
                        [r.position for r in readouts])
        for readout, token in zip(readouts, ids.tolist(), strict=True):
            done = completions[readout.sequence]
            logged = done.token_ids[readout.position + 1 - len(done.request.prompt)]
            if token != logged:
                self.same[self.place(readout.sequence, readout.position)] = False
            self.tokens[readout.sequence] += 1

    def _compare_exits(self, event: Pass, hidden: Tensor) -> None:
        rows, newest, row = [], [], -1
        for span in event.spans:
            row += span.stop - span.start
            if span.stop == self.tokens[span.sequence]:
                rows.append(row)
                newest.append(span)
        if not rows:
            return
        slots = self.runner.cache.slots
        leaves = self.gate.leaving(self.runner.model.gate(hidden[rows]),
                                   [slots[span.sequence] for span in newest],
                                   [span.loop for span in newest])
        left = {readout.sequence for readout in event.readouts}  # membership only
        for span, leave in zip(newest, leaves, strict=True):
            if leave != (span.sequence in left):
                self.same[self.place(span.sequence, span.stop - 1)] = False
