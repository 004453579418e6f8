"""Which cells run next. Plain integers, no torch, no clock, nothing that iterates a set.

Invariants, checked by `check_integrity`:
1. Frontiers never increase with the loop: f[0] >= f[1] >= ... >= f[T] >= 0.
2. f[0] is the number of tokens; the newest position is f[0] - 1. It is at least the prompt and
   below the limit, whose last token is never run, so cells stay within the reservation.
3. A loop beyond the deepest exit so far has frontier 0: what is never needed is never run.
4. At most max_sequences are active and the reserved pages never exceed the capacity.
5. Waiting sequences are admitted in order; active ones keep the order of admission.

`peak_catch_up` is the largest number of older cells that one span ran for a newer position.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from engine.plan import Admit, Capacity, Finish, Span
from engine.schedule import Schedule


@dataclass
class Sequence:
    """State of one active sequence, integers only.

    Attributes:
        number: place in the request list.
        uid: 64-bit key of its random numbers.
        prompt: prompt tokens. limit: most tokens it may ever hold (prompt + max new).
        frontier: f[0..T]. depth: exit depth of the newest position, None until decided.
        deepest: deepest exit depth so far.
    """

    number: int
    uid: int
    prompt: int
    limit: int
    frontier: list[int]
    depth: int | None = None
    deepest: int = 0


@dataclass(frozen=True)
class Plan:
    """Spans of the next pass in row order.

    rows: their rows. candidates: (index into spans, row) of each span whose last row is the
    newest position of its sequence: where a read-out or an exit decision may fall.
    """

    spans: tuple[Span, ...]
    rows: int
    candidates: tuple[tuple[int, int], ...]


@dataclass
class Scheduler:
    """Plans passes for one schedule within one capacity."""

    schedule: Schedule
    capacity: Capacity
    seed: int
    waiting: deque = field(default_factory=deque)
    active: dict[int, Sequence] = field(default_factory=dict)
    reserved: int = 0
    peak_catch_up: int = 0

    def add(self, number: int, uid: int, prompt: int, max_new: int) -> None:
        """Queue a request. ValueError when it can never fit, with the sizes."""
        limit = prompt + max_new
        need = self.capacity.sequence_pages(limit - 1, self.schedule.max_depth)
        if need > self.capacity.pages:
            raise ValueError(
                f"request {number}: {prompt} prompt + {max_new} new tokens at {self.schedule.max_depth} "
                f"loops need {need} pages of {self.capacity.page_size} positions; the engine has "
                f"{self.capacity.pages}: raise pages or lower max_new_tokens")
        frontier = [prompt] + [0] * self.schedule.loops
        self.waiting.append(Sequence(number, uid, prompt, limit, frontier))

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.active)

    def can_admit(self) -> bool:
        """Whether the next waiting request fits now."""
        if not self.waiting or len(self.active) >= self.capacity.max_sequences:
            return False
        return self.reserved + self._pages(self.waiting[0]) <= self.capacity.pages

    def admit(self) -> Admit:
        """Take the next waiting request in."""
        sequence = self.waiting.popleft()
        self.reserved += self._pages(sequence)
        self.active[sequence.number] = sequence
        self._aim(sequence)
        return Admit(sequence.number)

    def _pages(self, sequence: Sequence) -> int:
        # The last token of a full response is sampled, never run: limit - 1 positions.
        return self.capacity.sequence_pages(sequence.limit - 1, self.schedule.max_depth)

    def _aim(self, sequence: Sequence) -> None:
        position = sequence.frontier[0] - 1
        sequence.depth = self.schedule.depth(self.seed, sequence.uid, position,
                                             position + 1 - sequence.prompt)

    def plan(self) -> Plan:
        """The next pass: one span a sequence, oldest first, every sequence at least one row."""
        spans, candidates = [], []
        rows, left = 0, len(self.active)
        for sequence in self.active.values():
            left -= 1
            frontier = sequence.frontier
            needed = frontier[0]  # cells 0..newest position
            loop = next(t for t in range(1, len(frontier)) if frontier[t] < needed)
            start = frontier[loop]
            room = min(self.capacity.max_span, self.capacity.max_rows - rows - left)
            stop = min(needed, start + room)
            rows += stop - start
            if needed > sequence.prompt:  # before the first token it is prefill, not catch-up
                self.peak_catch_up = max(self.peak_catch_up, min(stop, needed - 1) - start)
            if stop == needed:
                candidates.append((len(spans), rows - 1))
            spans.append(Span(sequence.number, loop, start, stop))
        return Plan(tuple(spans), rows, tuple(candidates))

    def advance(self, spans: tuple[Span, ...]) -> None:
        """The cells of these spans are computed."""
        for number, loop, start, stop in spans:
            frontier = self.active[number].frontier
            if frontier[loop] != start or stop > frontier[loop - 1]:
                raise AssertionError(f"span {number, loop, start, stop} off frontier {frontier}")
            frontier[loop] = stop

    def exit_here(self, number: int, loop: int) -> None:
        """The gate lets the newest position of a sequence leave at `loop`."""
        self.active[number].depth = loop

    def append(self, number: int) -> None:
        """The newest position was read out and its token appended; aim at the next one."""
        sequence = self.active[number]
        sequence.deepest = max(sequence.deepest, sequence.depth)
        sequence.frontier[0] += 1
        self._aim(sequence)

    def finish(self, number: int) -> Finish:
        """The sequence has its last token; free its reservation."""
        sequence = self.active.pop(number)
        self.reserved -= self._pages(sequence)
        return Finish(number)

    def check_integrity(self) -> None:
        """Audit the numbered invariants; AssertionError names the one that broke."""
        if len(self.active) > self.capacity.max_sequences or self.reserved > self.capacity.pages:
            raise AssertionError("invariant 4: sequences or reserved pages exceed the capacity")
        if self.reserved != sum(self._pages(s) for s in self.active.values()):
            raise AssertionError("invariant 4: reserved pages do not add up")
        numbers = [*self.active, *(s.number for s in self.waiting)]
        if numbers != sorted(numbers):
            raise AssertionError("invariant 5: order of admission broken")
        for sequence in self.active.values():
            frontier = sequence.frontier
            if any(a < b for a, b in pairwise(frontier)) or frontier[-1] < 0:
                raise AssertionError(f"invariant 1: frontier {frontier} increases with the loop")
            if not sequence.prompt <= frontier[0] < sequence.limit:
                raise AssertionError(f"invariant 2: {frontier[0]} tokens, limit {sequence.limit}")
            reach = max(sequence.deepest, sequence.depth or self.schedule.max_depth)
            if any(frontier[reach + 1:]):
                raise AssertionError(f"invariant 3: frontier {frontier} beyond loop {reach}")
