"""A rollout without a model: the scheduler driven by scripted text lengths and gate exits.

Executes cells one by one in its own book-keeping, which shares nothing with the scheduler's
frontiers, and audits the scheduler after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.plan import Capacity, Span
from engine.schedule import parse_schedule
from engine.scheduler import Scheduler


@dataclass
class Script:
    """One sequence: prompt tokens, most new tokens, and after how many its text ends."""

    prompt: int
    max_new: int
    length: int


@dataclass
class Trace:
    """What happened.

    passes: spans of each pass. admitted, finished: sequence numbers in order; depths: exit
    depths by sequence. own_passes: by sequence, passes that each newest position took part in
    until it was read out, and whether one of its spans was cut short of it. cells: by sequence,
    the (position, loop) that were run. peak_catch_up: the scheduler's.
    """

    passes: list[tuple[Span, ...]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    depths: dict[int, list[int]] = field(default_factory=dict)
    own_passes: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    cells: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    peak_catch_up: int = 0


def drive(text: str, scripts: Sequence[Script], capacity: Capacity, *, loops: int = 4, seed: int = 0,
          leaves: Callable[[int, int, int], bool] = lambda number, position, loop: False) -> Trace:
    """Run every script to its end.

    leaves(sequence, position, loop): the scripted gate, asked below the schedule's last loop.
    """
    schedule = parse_schedule(text, loops)
    scheduler = Scheduler(schedule, capacity, seed)
    for number, script in enumerate(scripts):
        scheduler.add(number, uid=1000 + number, prompt=script.prompt, max_new=script.max_new)
        scheduler.check_integrity()
    trace, run = Trace(), _Cells(scripts, capacity)
    while scheduler.busy:
        while scheduler.can_admit():
            trace.admitted.append(scheduler.admit().sequence)
            run.admit(trace.admitted[-1])
            scheduler.check_integrity()
        run.check_admission(scheduler, trace)
        plan = scheduler.plan()
        run.execute(plan.spans, plan.rows, plan.candidates)
        trace.passes.append(plan.spans)
        scheduler.advance(plan.spans)
        scheduler.check_integrity()
        for index, _ in plan.candidates:
            number, loop, _, stop = plan.spans[index]
            if schedule.kind == "gate" and (loop == schedule.high or (
                    loop >= schedule.low and leaves(number, stop - 1, loop))):
                scheduler.exit_here(number, loop)
            if scheduler.active[number].depth != loop:
                continue
            if run.read_out(number, loop):
                trace.finished.append(scheduler.finish(number).sequence)
            else:
                scheduler.append(number)
            scheduler.check_integrity()
    trace.depths, trace.own_passes, trace.cells = run.depths, run.own_passes, run.cells
    trace.peak_catch_up = scheduler.peak_catch_up
    return trace


class _Cells:
    """Cells that were run, tokens and pages, kept apart from the scheduler's numbers."""

    def __init__(self, scripts: Sequence[Script], capacity: Capacity):
        self.scripts, self.capacity = scripts, capacity
        self.active: list[int] = []
        self.tokens: dict[int, int] = {}
        self.cells: dict[int, set[tuple[int, int]]] = {}
        self.depths: dict[int, list[int]] = {}
        self.own_passes: dict[int, list[tuple[int, bool]]] = {}
        self.current: dict[int, list] = {}

    def admit(self, number: int) -> None:
        self.active.append(number)
        self.tokens[number] = self.scripts[number].prompt
        self.cells[number], self.depths[number], self.own_passes[number] = set(), [], []
        self.current[number] = [0, False]

    def execute(self, spans, rows, candidates) -> None:
        assert [span.sequence for span in spans] == self.active, "one span a sequence, oldest first"
        assert rows == sum(span.stop - span.start for span in spans) <= self.capacity.max_rows
        row, expected = 0, []
        for index, (number, loop, start, stop) in enumerate(spans):
            assert 0 < stop - start <= self.capacity.max_span
            assert stop <= self.tokens[number]
            before = set(self.cells[number])
            for position in range(start, stop):
                assert (position, loop) not in before, "a cell runs once"
                assert loop == 1 or (position, loop - 1) in before, "its input exists"
                self.cells[number].add((position, loop))
                assert position == 0 or (position - 1, loop) in self.cells[number], "its keys exist"
            row += stop - start
            if stop == self.tokens[number]:
                expected.append((index, row - 1))
                self.current[number][0] += 1
            else:
                self.current[number][1] = True
        assert list(candidates) == expected
        assert self.pages() <= self.capacity.pages

    def pages(self) -> int:
        size = self.capacity.page_size
        return sum(len({(loop, position // size) for position, loop in self.cells[number]})
                   for number in self.active)

    def read_out(self, number: int, loop: int) -> bool:
        """Take the next token; True when the text ends with it."""
        newest = self.tokens[number] - 1
        assert {t for position, t in self.cells[number] if position == newest} == set(range(1, loop + 1))
        self.depths[number].append(loop)
        self.own_passes[number].append(tuple(self.current[number]))
        self.current[number] = [0, False]
        self.tokens[number] += 1
        done = len(self.depths[number]) == self.scripts[number].length
        if done:
            self.active.remove(number)
        return done

    def check_admission(self, scheduler: Scheduler, trace: Trace) -> None:
        """Whoever waits does so because the first in line does not fit."""
        assert trace.admitted == list(range(len(trace.admitted)))
        if len(trace.admitted) == len(self.scripts) or len(self.active) == self.capacity.max_sequences:
            return
        deepest, size = scheduler.schedule.max_depth, self.capacity.page_size

        def worst(script):
            return deepest * -(-(script.prompt + script.max_new - 1) // size)

        held = sum(worst(self.scripts[number]) for number in self.active)
        assert held + worst(self.scripts[len(trace.admitted)]) > self.capacity.pages
