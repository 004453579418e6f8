"""When each cell waited, ran and was read out: a log turned by 90 degrees.

`timeline` has every cell of one sequence, `overview` one number a pass of many. Integers only;
passes are numbered from 0 in the order of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    _check_sequence(log, sequence)
    completion = log.completions[sequence]
    prompt = len(completion.request.prompt)
    tokens, reached = prompt, {}  # position -> (deepest loop so far, its pass)
    ran, waited, read = [], [], []
    passes = [event for event in log.events if isinstance(event, Pass)]
    for at, event in enumerate(passes):
        for number, loop, start, stop in event.spans:
            if number != sequence:
                continue
            ran.append(Ran(at, loop, start, stop, _older(start, stop, tokens, prompt)))
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


@dataclass(frozen=True)
class Overview:
    """What each sequence did in each pass; n sequences in the order asked for, P passes, T loops.

    Attributes:
        loop: int64 [n, P], the loop that ran; 0 where the sequence was not in the pass.
        put_off: int64 [n, P], positions after the pass that have not run all T loops: those whose
            deeper loops are put off, the newest token included, so at least 1; -1 where it was not
            in the pass.
        rows: int64 [P, T], rows of these sequences by loop. older: the part of it that ran for a
            newer position (catch-up).
    """

    loop: np.ndarray
    put_off: np.ndarray
    rows: np.ndarray
    older: np.ndarray


def overview(log: ScheduleLog, sequences: Sequence[int]) -> Overview:
    """All passes of the log as these sequences went through them. ValueError for one that it does not have."""
    count, loops = len(log.completions), log.header["loops"]
    for number in sequences:
        _check_sequence(log, number)
    place = {number: row for row, number in enumerate(sequences)}
    passes = [event for event in log.events if isinstance(event, Pass)]
    loop, put_off = (np.full((len(sequences), len(passes)), none) for none in (0, -1))
    rows, older = (np.zeros((len(passes), loops), np.int64) for _ in range(2))
    tokens, deepest = [len(c.request.prompt) for c in log.completions], [0] * count
    for at, event in enumerate(passes):
        spans = [span for span in event.spans if span.sequence in place]
        for number, depth, start, stop in spans:
            prompt = len(log.completions[number].request.prompt)
            loop[place[number], at] = depth
            rows[at, depth - 1] += stop - start
            older[at, depth - 1] += _older(start, stop, tokens[number], prompt)
            deepest[number] = stop if depth == loops else deepest[number]
        for readout in event.readouts:
            tokens[readout.sequence] += 1
        for span in spans:
            put_off[place[span.sequence], at] = tokens[span.sequence] - deepest[span.sequence]
    return Overview(loop, put_off, rows, older)


def _older(start: int, stop: int, tokens: int, prompt: int) -> int:
    """Positions of a span that it ran for a newer one: all but the newest, and none while the prompt runs."""
    return min(stop, tokens - 1) - start if tokens > prompt else 0


def _check_sequence(log: ScheduleLog, sequence: int) -> None:
    if not 0 <= sequence < len(log.completions):
        raise ValueError(f"sequence {sequence} is not in the log; it has {len(log.completions)}, numbered "
                         "from 0")
