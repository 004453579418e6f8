"""Where the wall time of an engine run goes. It only watches: it decides nothing and enters no log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

import torch

PHASES = ("start", "plan", "passes", "gate", "head", "sampling", "commit", "header")
T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """Wall seconds of one `Engine.generate` by phase; nothing is left out between two phases.

    On a GPU, without synchronising, work counts where the host waits for it: mostly under sampling.

    Attributes:
        start: checks of the requests, memory of the cache.
        plan: admission and the choice of the next pass.
        passes: the passes themselves, from their spans to hidden states.
        gate: frontiers, and which positions are read out.
        head: logits of the positions read out.
        sampling: noise, tokens, log-probabilities.
        commit: tokens and events (the records that a log is made of), ends of texts, callbacks.
        header: final audits, digest of the weights, completions.
        ends: from the start of the run to the end of each pass's commit, in order.
        ran: of `passes` alone, up to the same moments.
    """

    start: float
    plan: float
    passes: float
    gate: float
    head: float
    sampling: float
    commit: float
    header: float
    ends: tuple[float, ...]
    ran: tuple[float, ...]

    @property
    def total(self) -> float:
        """Of the whole run."""
        return sum(getattr(self, phase) for phase in PHASES)


class Clock:
    """Runs from its making; each lap gives the time since the last one to a phase.

    synchronise: wait for the device at each lap, so that its time falls to the phase that asked
    for it; this takes away what host and device do at the same time.
    """

    def __init__(self, device: torch.device, *, synchronise: bool = False):
        self.device = device if synchronise and device.type == "cuda" else None
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.ends: list[float] = []
        self.ran: list[float] = []
        self.began = self.last = time.perf_counter()

    def lap(self, phase: str, done: T = None) -> T:
        """`done` was just computed: the time since the last lap was spent on it, in `phase`."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.spent[phase] += now - self.last
        self.last = now
        return done

    def end_pass(self) -> None:
        """The pass is committed."""
        self.lap("commit")
        self.ends.append(self.last - self.began)
        self.ran.append(self.spent["passes"])

    def seconds(self) -> Seconds:
        """What was spent so far."""
        return Seconds(**self.spent, ends=tuple(self.ends), ran=tuple(self.ran))
