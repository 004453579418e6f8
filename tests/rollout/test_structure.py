"""Structural checks: what is left of a log when one decision in it is changed and it is signed again."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from schedule_logs import SCHEDULES, SMALL, forge, rollout_log, take_apart

from engine import Capacity
from engine.plan import Finish, Pass
from models.rule import padded
from rollout.log import decode, encode, write_log
from rollout.structure import check_events, check_structure, read_checked

GATE, MIX, PERIODIC = SCHEDULES[2], SCHEDULES[4], SCHEDULES[3]


@pytest.fixture(scope="module")
def made():
    """Bytes of one log a schedule, made once."""
    return {schedule: encode(rollout_log(schedule)[1]) for schedule in SCHEDULES}


def refused(data: bytes, message: str | None = None) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_structure(decode(data))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("capacity", [SMALL, replace(SMALL, row_multiple=4, head_multiple=2), Capacity()])
def test_every_log_of_the_engine_passes(schedule, capacity):
    check_structure(rollout_log(schedule, capacity=capacity)[1])


COUNTED = ("prompt_length", "response_length", "exit_depths", "event_kind", "event_sequence", "pass_spans",
           "pass_rows", "pass_readouts", "pass_head_rows", "span_sequence", "span_stage", "span_rows",
           "readout_row", "readout_kind")


@pytest.mark.parametrize("schedule", [GATE, PERIODIC])
def test_one_more_or_one_less_anywhere_is_refused(schedule):
    """Every entry of every array that says what ran, by 1 up and by 1 down."""
    data = encode(rollout_log(schedule, count=4, new=4)[1])

    def bump(name, index, by):
        def change(described, arrays):
            arrays[name][index] = int(arrays[name][index]) + by
        return change

    for name, values in arrays_of(data).items():
        if name not in COUNTED:
            continue
        for index, value in enumerate(values.tolist()):
            for by in (1, -1):
                if value + by >= 0:
                    refused(forge(data, bump(name, index, by)))


def arrays_of(data):
    return take_apart(data)[1]


# Changes of several arrays at once.

def passes_of(arrays):
    """(first span, past the last span, first read-out, past the last) of each pass."""
    spans = np.cumsum([0, *arrays["pass_spans"]])
    readouts = np.cumsum([0, *arrays["pass_readouts"]])
    return list(zip(spans, spans[1:], readouts, readouts[1:], strict=False))


def swap(arrays, names, a, b):
    for name in names:
        arrays[name][[a, b]] = arrays[name][[b, a]]


def cut(arrays, names, start, stop):
    for name in names:
        arrays[name] = np.delete(arrays[name], np.s_[start:stop])


SPAN = ("span_sequence", "span_stage", "span_rows")
READOUT = ("readout_row", "readout_kind")
PASS = ("pass_spans", "pass_rows", "pass_readouts", "pass_head_rows")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_spans_of_a_pass_swapped(made, schedule):
    data = made[schedule]
    starts = [start for start, stop, _, _ in passes_of(arrays_of(data)) if stop - start >= 2]
    assert len(starts) > 8
    for start in starts[::4]:
        refused(forge(data, lambda d, a, at=start: swap(a, SPAN, at, at + 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_span_dropped(made, schedule):
    """With the row count put right, so that only what is missing tells."""
    data = made[schedule]
    wide = [(n, start) for n, (start, stop, _, _) in enumerate(passes_of(arrays_of(data))) if stop - start >= 2]
    assert len(wide) > 8
    for number, start in wide[::4]:

        def drop(described, arrays, number=number, start=start):
            arrays["pass_rows"][number] -= arrays["span_rows"][start]
            arrays["pass_spans"][number] -= 1
            cut(arrays, SPAN, start, start + 1)

        refused(forge(data, drop))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pass_dropped_or_two_swapped(made, schedule):
    data = made[schedule]
    arrays = arrays_of(data)
    events = np.flatnonzero(arrays["event_kind"] == 1)
    places = passes_of(arrays)
    for number in range(0, len(places) - 1, 4):
        start, stop, first, last = places[number]

        def drop(described, arrays, number=number, start=start, stop=stop, first=first, last=last):
            cut(arrays, SPAN, start, stop)
            cut(arrays, READOUT, first, last)
            cut(arrays, PASS, number, number + 1)
            cut(arrays, ("event_kind",), events[number], events[number] + 1)

        refused(forge(data, drop))
    log = decode(data)
    numbers = [i for i, event in enumerate(log.events) if isinstance(event, Pass)]
    changed = 0
    for one, two in pairwise(numbers):
        swapped = list(log.events)
        swapped[one], swapped[two] = swapped[two], swapped[one]
        if swapped != list(log.events):
            changed += 1
            with pytest.raises((RuntimeError, AssertionError)):
                check_structure(decode(encode(replace(log, events=tuple(swapped)))))
    assert changed > 10


def test_a_pass_split_in_two_respects_the_frontiers_but_not_the_plan(made):
    """The shapes of both halves differ from those of the rollout, so bits may: only planning again finds it."""
    log = decode(made["dense"])
    place, event = next((i, e) for i, e in enumerate(log.events)
                        if isinstance(e, Pass) and len(e.spans) == 3 and not e.readouts)
    halves = [Pass(spans, padded(sum(s.stop - s.start for s in spans), 1), (), 0)
              for spans in (event.spans[:1], event.spans[1:])]
    split = decode(encode(replace(log, events=(*log.events[:place], *halves, *log.events[place + 1:]))))
    check_events(split)
    with pytest.raises(RuntimeError, match=f"event {place}: the schedule plans Pass"):
        check_structure(split)


def test_passes_of_different_sequences_merged(made):
    """Two sequences one after the other, told to have run together: the frontiers would allow it."""
    log = rollout_log("dense", count=2, new=3, capacity=replace(SMALL, max_sequences=1))[1]
    one = [e for e in log.events if isinstance(e, Pass) and e.spans[0].sequence == 0]
    two = [e for e in log.events if isinstance(e, Pass) and e.spans[0].sequence == 1]
    merged = []
    for a, b in zip(one, two, strict=False):
        rows = a.padded_rows
        readouts = a.readouts + tuple(r._replace(row=r.row + rows) for r in b.readouts)
        merged.append(Pass(a.spans + b.spans, rows + b.padded_rows, readouts, len(readouts)))
    events = (*[e for e in log.events if not isinstance(e, Pass | Finish)], *merged, *one[len(two):], *two[len(one):],
              *[e for e in log.events if isinstance(e, Finish)])
    changed = decode(encode(replace(log, events=events)))
    check_events(changed)
    refused(encode(changed), "event [0-9]+: the schedule plans")


def header(**values):
    return lambda described, arrays: described["header"].update(values)


def capacity(**values):
    return lambda described, arrays: described["header"]["capacity"].update(values)


def sequence(number, field, value):
    place = ("dataset", "example", "group", "sample", "max_new_tokens", "finish_reason", "stop_id").index(field)
    return lambda described, arrays: described["sequences"][number].__setitem__(place, value)


def array(name, index, value):
    return lambda described, arrays: arrays[name].__setitem__(index, value)


def move_border(described, arrays):
    """The first response token of sequence 0 becomes the last one of its prompt."""
    at = arrays["prompt_length"][0]
    arrays["prompt_ids"] = np.insert(arrays["prompt_ids"], at, arrays["response_ids"][0])
    arrays["prompt_length"][0] += 1
    arrays["response_length"][0] -= 1
    cut(arrays, ("response_ids", "trained", "exit_depths", "logprobs"), 0, 1)


FORGERIES = {
    "finish reason": (GATE, lambda d, a: flip_reason(d), "finish reason|ended by length"),
    "unknown finish reason": (GATE, sequence(0, "finish_reason", "tired"), "finish reason 'tired'"),
    "stop string without one": (GATE, lambda d, a: length_to_stop_string(d), "the header has none"),
    "stop id of another": (GATE, lambda d, a: other_stop(d), "do not match the last token"),
    "limit above": (GATE, lambda d, a: other_limit(d, 1), "ended by length before"),
    "limit below": (GATE, lambda d, a: other_limit(d, -1), "exceed max_new_tokens"),
    "limit beyond the pages": (GATE, sequence(0, "max_new_tokens", 10**6), "header: request 0: .* need"),
    "stop id in the middle": (GATE, lambda d, a: d["header"]["stop_ids"].append(int(a["response_ids"][0])),
                              "a stop id stands before the end"),
    "no stop ids": (GATE, header(stop_ids=[]), "do not match the last token"),
    "token beyond the vocabulary": (GATE, array("prompt_ids", 0, 29), "outside the vocabulary"),
    "response token beyond": (GATE, array("response_ids", -1, 10**6), "outside the vocabulary"),
    "border of the prompt": (GATE, move_border, None),
    "same uid twice": (GATE, lambda d, a: array("uid", 1, a["uid"][0])(d, a), "sequences 0 and 1 have the same uid"),
    "order of admission": (GATE, lambda d, a: swap(a, ("event_sequence",), 0, 1), None),
    "unknown sequence": (GATE, array("event_sequence", 0, 99), "sequence 99 is unknown"),
    "peak": (GATE, lambda d, a: d.update(peak_catch_up=d["peak_catch_up"] + 1), "peak_catch_up"),
    "schedule": (GATE, header(schedule="dense"), None),
    "least depth of the gate": (GATE, header(schedule="exit:gate=0.5,min=2,max=3"), "outside 2..3"),
    "greatest depth of the gate": (GATE, header(schedule="exit:gate=0.5,min=1,max=2"), "outside 1..2"),
    "schedule not canonical": (GATE, header(schedule="exit:gate=0.50,min=1,max=3"), "not in canonical form"),
    "unknown schedule": (GATE, header(schedule="lucky"), "header: schedule = 'lucky' is not a schedule"),
    "period": (PERIODIC, header(schedule="exit:periodic=1,4"), None),
    "loops": ("dense", header(loops=4), "event"),
    "seed of drawn depths": (MIX, header(seed=4), "event"),
    "uid of drawn depths": (MIX, array("uid", 0, 5), "event"),
    "weights of drawn depths": (MIX, header(schedule="exit:mix=1:1,2:1,3:1"), "event"),
    "rows of a span": (GATE, capacity(max_span=6), "event"),
    "rows of a pass": (GATE, capacity(max_rows=11), None),
    "fewer sequences": (GATE, capacity(max_sequences=2), "event"),
    "more sequences": (GATE, capacity(max_sequences=4), "event"),
    "fewer pages": (GATE, capacity(pages=10), "event"),
    "smaller pages": (GATE, capacity(page_size=1), "event|request"),
    "row padding": (GATE, capacity(row_multiple=2), "padded rows"),
    "head padding": (GATE, capacity(head_multiple=2), "head rows"),
    "more sequences than rows": (GATE, capacity(max_sequences=50), "header: capacity"),
    "numerics": (GATE, header(numerics="invariant"), "header: numerics = 'invariant' does not go with"),
    "rule": (GATE, header(rule={"rows": 1}), "header: numerics = 'shapes' does not go with"),
    "half a rule": (GATE, header(numerics="invariant", rule={"rows": 1}), "header: .*row_block"),
    "rule that is not kept": (GATE, header(numerics="invariant", rule=dict(
        rows=3, row_block=3, head_rows=1, head_block=1, queries=1, query_block=1, length=64)), "row_multiple = 1 breaks"),
    "linear": (GATE, header(linear="other"), "header: linear"),
    "catch-up": (GATE, header(catch_up="piggyback:3"), "header: catch_up"),
    "derived version": (GATE, lambda d, a: d["header"]["derived"].update(groups=99), "header: derived"),
}


def flip_reason(described):
    entry = next(e for e in described["sequences"] if e[5] == "length")
    entry[5] = "stop"


def length_to_stop_string(described):
    next(e for e in described["sequences"] if e[5] == "length")[5] = "stop_string"


def other_stop(described):
    entry = next(e for e in described["sequences"] if e[5] == "stop")
    entry[6] = 3 if entry[6] == 7 else 7


def other_limit(described, by):
    next(e for e in described["sequences"] if e[5] == "length")[4] += by


@pytest.mark.parametrize("name", FORGERIES)
def test_a_change_that_is_signed_again_is_refused(made, name):
    schedule, change, message = FORGERIES[name]
    check_structure(decode(made[schedule]))
    refused(forge(made[schedule], change), message)


def test_an_empty_prompt_or_response_is_refused(made):
    def no_prompt(described, arrays):
        cut(arrays, ("prompt_ids",), 0, arrays["prompt_length"][0])
        arrays["prompt_length"][0] = 0

    refused(forge(made["dense"], no_prompt), "sequence 0: prompt or response is empty")


def test_reading_with_checks_names_the_file(tmp_path, made):
    path = tmp_path / "schedule.log"
    write_log(decode(made["dense"]), path)
    assert read_checked(path) == decode(made["dense"])
    path.write_bytes(forge(made["dense"], header(numerics="lucky")))
    with pytest.raises(RuntimeError, match=r"log .*schedule\.log: header: numerics = 'lucky'"):
        read_checked(path)
