"""When each cell of one sequence waited, ran and was read out: a log turned by 90 degrees.

Integers only; passes are numbered from 0 in the order of the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.plan import Pass
from rollout.log import ScheduleLog


class Ran(NamedTuple):
    """A span: positions start..stop-1 ran at `loop` in pass `at`; `older` of them were run for a
    newer position (catch-up)."""

    at: int
    loop: int
    start: int
    stop: int
    older: int


class Waited(NamedTuple):
    """The cell (position, loop) was pending, its input computed, in passes start..stop-1."""

    position: int
    loop: int
    start: int
    stop: int


class Read(NamedTuple):
    """The position was read out after `loop` in pass `at`."""

    at: int
    position: int
    loop: int


@dataclass(frozen=True)
class Timeline:
    """One sequence.

    Attributes:
        prompt: prompt tokens. positions: positions that were inputs; the last token is not.
        first, last: passes it took part in, last excluded.
        ran, waited, read: in order of the pass in which each began (waited: ended).
    """

    prompt: int
    positions: int
    first: int
    last: int
    ran: tuple[Ran, ...]
    waited: tuple[Waited, ...]
    read: tuple[Read, ...]


def timeline(log: ScheduleLog, sequence: int) -> Timeline:
    """The timeline of a sequence. ValueError when the log has none of that number."""
    if not 0 <= sequence < len(log.completions):
        raise ValueError(f"sequence {sequence} is not in the log; it has {len(log.completions)}, numbered "
                         "from 0")
    completion = log.completions[sequence]
    prompt = len(completion.request.prompt)
    tokens, reached = prompt, {}  # position -> (deepest loop so far, its pass)
    ran, waited, read = [], [], []
    passes = [event for event in log.events if isinstance(event, Pass)]
    for at, event in enumerate(passes):
        for number, loop, start, stop in event.spans:
            if number != sequence:
                continue
            ran.append(Ran(at, loop, start, stop, min(stop, tokens - 1) - start if tokens > prompt else 0))
            for position in range(start, stop):
                since = reached[position][1] + 1 if loop > 1 else at
                if since < at:
                    waited.append(Waited(position, loop, since, at))
                reached[position] = loop, at
        for readout in event.readouts:
            if readout.sequence == sequence:
                read.append(Read(at, readout.position, readout.loop))
                tokens += 1
    last = ran[-1].at + 1
    for position, (loop, at) in sorted(reached.items()):
        if loop < log.header["loops"] and at + 1 < last:
            waited.append(Waited(position, loop + 1, at + 1, last))
    return Timeline(prompt, prompt + len(completion.token_ids) - 1, ran[0].at, last, tuple(ran),
                    tuple(waited), tuple(read))
