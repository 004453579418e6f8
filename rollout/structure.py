"""Whether the events of a log make sense: integers only, no model, no torch.

Two independent checks. `check_events` executes the frontiers. `check_plan` lets the
scheduler plan again with the logged tokens and depths: every pass must come out the same.
Neither can tell whether a token or an exit was what the model gave: replay does that.
"""

from __future__ import annotations

from pathlib import Path

from engine import groups, sampler
from engine.plan import Admit, Capacity, Finish, Pass, Readout
from engine.sampler import Sampling
from engine.schedule import Schedule, parse_schedule
from engine.scheduler import Scheduler
from models.linear import KINDS
from models.rule import Rule, padded
from rollout.log import ScheduleLog, read_log

DERIVED = {"groups": groups.VERSION, "sampler": sampler.VERSION}
ONLY = {"catch_up": "lazy", "derived": DERIVED}


def read_checked(path: str | Path) -> ScheduleLog:
    """Read a log and check its structure; RuntimeError and ValueError name the file."""
    log = read_log(path)
    try:
        check_structure(log)
    except RuntimeError as error:
        raise RuntimeError(f"log {path}: {error}") from None
    return log


def check_structure(log: ScheduleLog) -> None:
    """RuntimeError naming the first event, sequence or field that does not fit."""
    header = log.header
    for name, only in ONLY.items():
        if header[name] != only:
            raise RuntimeError(f"header: {name} = {header[name]!r} is unknown; this program has {only!r}")
    if header["linear"] not in KINDS:
        raise RuntimeError(f"header: linear = {header['linear']!r} is unknown; this program has {', '.join(KINDS)}")
    _check_rule(header)
    try:
        schedule, capacity = parse_schedule(header["schedule"], header["loops"]), Capacity(**header["capacity"])
        scheduler = Scheduler(schedule, capacity, header["seed"])
        Sampling(greedy=header["greedy"], top_k=header["top_k"], top_p=header["top_p"])
        for number, completion in enumerate(log.completions):
            request = completion.request
            scheduler.add(number, request.uid, len(request.prompt), request.max_new_tokens)
    except ValueError as error:
        raise RuntimeError(f"header: {error}") from None
    if schedule.text != header["schedule"]:
        raise RuntimeError(f"header: schedule {header['schedule']!r} is not in canonical form")
    first: dict[int, int] = {}
    for number, completion in enumerate(log.completions):
        _check_sequence(log, number, schedule)
        if first.setdefault(completion.request.uid, number) != number:
            raise RuntimeError(f"sequences {first[completion.request.uid]} and {number} have the same uid")
    check_events(log)
    check_plan(log, scheduler)


def _check_rule(header: dict) -> None:
    """The shape rule belongs to numerics `invariant` and must be kept by the padded row counts."""
    numerics, rule = header["numerics"], header["rule"]
    if numerics not in ("shapes", "invariant") or (numerics == "invariant") != bool(rule):
        raise RuntimeError(f"header: numerics = {numerics!r} does not go with rule = {rule!r}")
    if not rule:
        return
    try:
        found = Rule(**rule)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"header: {error}") from None
    for name, multiple in (("row_multiple", found.rows), ("head_multiple", found.head_rows)):
        if header["capacity"][name] % multiple:
            raise RuntimeError(f"header: capacity {name} = {header['capacity'][name]} breaks the shape rule, which "
                               f"pads to multiples of {multiple}")


def _check_sequence(log: ScheduleLog, number: int, schedule: Schedule) -> None:
    completion, header = log.completions[number], log.header
    request, response, reason = completion.request, completion.token_ids, completion.finish_reason

    def fail(what: str) -> None:
        raise RuntimeError(f"sequence {number}: {what}")

    if not request.prompt or not response:
        fail("prompt or response is empty")
    if len(response) > request.max_new_tokens:
        fail(f"{len(response)} response tokens exceed max_new_tokens = {request.max_new_tokens}")
    if max(*request.prompt, *response) >= header["vocab"]:
        fail("a token id is outside the vocabulary")
    low, high = (schedule.low, schedule.high) if schedule.kind == "gate" else (1, schedule.max_depth)
    if not all(low <= depth <= high for depth in completion.exit_depths):
        fail(f"an exit depth lies outside {low}..{high}, which {schedule.text} allows")
    stops = [token in header["stop_ids"] for token in response]
    if any(stops[:-1]):
        fail("a stop id stands before the end of the response")
    expected_stop = response[-1] if stops[-1] else None
    if completion.stop_id != expected_stop or (reason == "stop") != stops[-1]:
        fail(f"finish reason {reason!r}, stop id {completion.stop_id} do not match the last token "
             f"{response[-1]}")
    if reason == "length" and len(response) != request.max_new_tokens:
        fail("it ended by length before max_new_tokens")
    if reason == "stop_string" and not header["stop_strings"]:
        fail("it ended by a stop string but the header has none")
    if reason not in ("stop", "stop_string", "length"):
        fail(f"finish reason {reason!r} is unknown")


def check_events(log: ScheduleLog) -> None:
    """Execute frontiers and read-outs: spans start at the frontier, each token is read once."""
    loops, capacity = log.header["loops"], Capacity(**log.header["capacity"])
    active: dict[int, list[int]] = {}  # frontiers f[0..T], in order of admission
    rank: dict[int, int] = {}  # place in the order of admission, of all admitted so far
    for index, event in enumerate(log.events):
        where = f"event {index}"
        if isinstance(event, Pass):
            _check_pass(where, event, active, rank, log, capacity)
            continue
        number = event.sequence
        if not 0 <= number < len(log.completions):
            raise RuntimeError(f"{where}: sequence {number} is unknown")
        completion = log.completions[number]
        if isinstance(event, Admit):
            if number in rank:
                raise RuntimeError(f"{where}: sequence {number} is admitted twice")
            rank[number] = len(rank)
            active[number] = [len(completion.request.prompt), *[0] * loops]
        elif isinstance(event, Finish):
            tokens = active.pop(number, None)
            if tokens is None or tokens[0] != len(completion.request.prompt) + len(completion.token_ids):
                raise RuntimeError(f"{where}: sequence {number} finishes before its last token was "
                                   "read out")
    if active or len(rank) != len(log.completions):
        raise RuntimeError("the log ends before every sequence has finished")


def _check_pass(where: str, event: Pass, active: dict[int, list[int]], rank: dict[int, int],
                log: ScheduleLog, capacity: Capacity) -> None:
    loops, rows, last_row = log.header["loops"], 0, {}
    order = [rank[span.sequence] if span.sequence in active else -1 for span in event.spans]
    if not event.spans or -1 in order or order != sorted(set(order)):
        raise RuntimeError(f"{where}: its spans are not in order of admission of active sequences")
    for number, loop, start, stop in event.spans:
        cells = active[number]
        if not 1 <= loop <= loops or start != cells[loop] or not start < stop <= cells[loop - 1]:
            raise RuntimeError(f"{where}: span of sequence {number} at loop {loop}, positions "
                               f"{start}..{stop} does not continue its frontier {cells}")
        cells[loop] = stop
        rows += stop - start
        last_row[rows - 1] = number
    if event.padded_rows != padded(rows, capacity.row_multiple) or rows > capacity.max_rows:
        raise RuntimeError(f"{where}: {event.padded_rows} padded rows for {rows} rows")
    if event.head_rows != padded(len(event.readouts), capacity.head_multiple):
        raise RuntimeError(f"{where}: {event.head_rows} head rows for {len(event.readouts)} read-outs")
    if [r.row for r in event.readouts] != sorted({r.row for r in event.readouts}):
        raise RuntimeError(f"{where}: its read-outs are not in row order")
    for row, number, position, loop in event.readouts:
        completion = log.completions[number]
        index = position + 1 - len(completion.request.prompt)
        if last_row.get(row) != number or position != active[number][0] - 1:
            raise RuntimeError(f"{where}: read-out of sequence {number} is not at its newest position")
        if index >= len(completion.token_ids) or completion.exit_depths[index] != loop:
            raise RuntimeError(f"{where}: sequence {number} is read out at loop {loop} for response "
                               f"token {index}, its exit depth says otherwise")
        active[number][0] += 1


def check_plan(log: ScheduleLog, scheduler: Scheduler) -> None:
    """Plan again with the logged depths; the first event that differs is named.

    scheduler: of the log's schedule, capacity and seed, with every sequence added.
    """
    events = iter(enumerate(log.events))

    def expect(planned) -> None:
        index, logged = next(events, (len(log.events), None))
        if logged != planned:
            raise RuntimeError(f"event {index}: the schedule plans {_brief(planned)}, the log has "
                               f"{_brief(logged)}")

    while scheduler.busy:
        while scheduler.can_admit():
            expect(scheduler.admit())
        _replan(log, scheduler, expect)
    if next(events, None) is not None:
        raise RuntimeError("events follow after every sequence has finished")
    if scheduler.peak_catch_up != log.peak_catch_up:
        raise RuntimeError(f"peak_catch_up = {log.peak_catch_up}, the events have "
                           f"{scheduler.peak_catch_up}")


def _replan(log: ScheduleLog, scheduler: Scheduler, expect) -> None:
    plan = scheduler.plan()
    scheduler.advance(plan.spans)
    readouts = []
    for span_index, row in plan.candidates:
        number, loop, _, stop = plan.spans[span_index]
        completion = log.completions[number]
        index = stop - len(completion.request.prompt)
        if scheduler.schedule.kind == "gate" and completion.exit_depths[index] == loop:
            scheduler.exit_here(number, loop)
        if scheduler.active[number].depth == loop:
            readouts.append(Readout(row, number, stop - 1, loop))
    capacity = scheduler.capacity
    expect(Pass(plan.spans, padded(plan.rows, capacity.row_multiple), tuple(readouts),
                padded(len(readouts), capacity.head_multiple)))
    for readout in readouts:
        completion = log.completions[readout.sequence]
        if readout.position + 2 - len(completion.request.prompt) < len(completion.token_ids):
            scheduler.append(readout.sequence)
        else:
            expect(scheduler.finish(readout.sequence))


def _brief(event) -> str:
    text = repr(event)
    return text if len(text) <= 200 else text[:200] + "..."
