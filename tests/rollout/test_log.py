"""The bytes of a schedule log: what is written is read back, and nothing else is."""

import hashlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from schedule_logs import SCHEDULES, forge, put_together, rollout_log, take_apart

from engine import Capacity, groups
from engine.plan import Pass, Span
from models.rule import key_length, pieces
from rollout.header import FIELDS
from rollout.log import ARRAYS, MAGIC, decode, encode, read_log, write_log
from rollout.statistics import statistics

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedule-log.md"


@pytest.fixture(scope="module")
def log():
    return rollout_log()[1]


@pytest.fixture(scope="module")
def data(log):
    return encode(log)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_log_is_read_back_as_it_was_written(schedule):
    _, log = rollout_log(schedule)
    found = decode(encode(log))
    assert found == log and found.token_count == log.token_count > 20
    assert [c.logprobs for c in found.completions] == [c.logprobs for c in log.completions]


def test_bytes_are_a_function_of_the_rollout(data):
    assert encode(rollout_log()[1]) == data == encode(decode(data))
    assert encode(rollout_log(seed=4)[1]) != data


def test_log_probs_keep_every_bit(log):
    """Also those that no sampler writes: -inf, -0.0, a subnormal."""
    odd = (-float("inf"), -0.0, float(np.float32(1e-42)), float(np.float32(-0.1)))
    first = log.completions[0]
    changed = replace(log, completions=(replace(first, logprobs=odd + first.logprobs[4:]), *log.completions[1:]))
    found = decode(encode(changed)).completions[0].logprobs[:4]
    assert struct.pack("<4f", *found) == struct.pack("<4f", *odd)


def test_every_altered_byte_is_refused(data):
    for place in range(len(data)):
        for bits in (0x01, 0xFF):
            altered = data[:place] + bytes([data[place] ^ bits]) + data[place + 1:]
            with pytest.raises(RuntimeError):
                decode(altered)


def test_every_truncation_and_extension_is_refused(data):
    for length in range(len(data)):
        with pytest.raises(RuntimeError):
            decode(data[:length])
    for more in (b"\0", data[-1:], data):
        with pytest.raises(RuntimeError, match="altered or cut short"):
            decode(data + more)


def test_what_is_wrong_is_said(data):
    described, arrays = take_apart(data)
    for changed, message in ((b"", "cut short: 0 bytes"), (b"reprise\n" + data[8:], "not a schedule log"),
                             (put_together(described, arrays, version=3), "format version 3 is unknown"),
                             (data[:-1], "altered or cut short")):
        with pytest.raises(RuntimeError, match=message):
            decode(changed)


def set_header(**values):
    return lambda described, arrays: described["header"].update(values)


def set_array(name, values):
    def change(described, arrays):
        arrays[name] = np.array(values(list(arrays[name])), arrays[name].dtype)
    return change


def set_described(**values):
    return lambda described, arrays: described.update(values)


FORGERIES = {
    "unknown header field": (set_header(top_q=5), "the header has unknown or missing fields: top_q"),
    "missing header field": (lambda d, a: d["header"].pop("seed"), "unknown or missing fields: seed"),
    "unknown field": (set_described(note="x"), "the JSON part has unknown or missing fields: note"),
    "unknown sequence field": (lambda d, a: d["sequence_fields"].append("mood"), "unknown sequence fields"),
    "short sequence": (lambda d, a: d["sequences"][1].pop(), "sequence 1: its fields .* malformed"),
    "sequence of another type": (lambda d, a: d["sequences"][1].__setitem__(4, 9.0), "sequence 1: its fields"),
    "unknown array": (lambda d, a: a.update(extra=np.zeros(2, "<u4")), "unknown or missing arrays"),
    "missing array": (lambda d, a: a.pop("readout_kind"), "unknown or missing arrays"),
    "array of another type": (lambda d, a: a.update(uid=a["uid"].view("<f8")), "unknown or missing arrays"),
    "left-over entry": (set_array("readout_row", lambda v: [*v, 0]), "array readout_row: 1 entries that nothing"),
    "left-over token": (set_array("response_ids", lambda v: [*v, 0]), "array response_ids: 1 entries"),
    "left-over uid": (set_array("uid", lambda v: [*v, 0]), "array uid: 1 entries"),
    "missing entry": (set_array("span_rows", lambda v: v[:-1]), "is too short|shorter"),
    "missing log-prob": (set_array("logprobs", lambda v: v[:-1]), "array logprobs is too short"),
    "missing finish": (set_array("event_kind", lambda v: v[:-1]), "array event_sequence: 1 entries"),
    "unknown event": (set_array("event_kind", lambda v: [9, *v[1:]]), "event kind 9 is unknown"),
    "unknown read-out kind": (set_array("readout_kind", lambda v: [1, *v[1:]]), "a read-out kind is unknown"),
    "read-out beyond the pass": (set_array("readout_row", lambda v: [60000, *v[1:]]), "names a row that its pass"),
    "trained = 2": (set_array("trained", lambda v: [2, *v[1:]]), "not in the form in which logs are written"),
    "negative peak": (set_described(peak_catch_up=-1), "peak_catch_up = -1 must be"),
    "loops": (set_header(loops="4"), "header: loops = '4' must be"),
    "policy version": (set_header(policy_version=True), "header: policy_version = True must be"),
    "temperature": (set_header(temperature=0), "header: temperature = 0 must be"),
    "temperature of text": (set_header(temperature="1"), "header: temperature = '1' must be"),
    "stop ids": (set_header(stop_ids=3), "header: stop_ids = 3 must be"),
    "weights": (set_header(weights="abc"), "header: weights = 'abc' must be"),
    "dtype": (set_header(dtype="float16"), "header: dtype = 'float16' must be one of"),
    "profile": (set_header(profile=["hf"]), "header: profile = .* must be one of"),
    "capacity": (lambda d, a: d["header"]["capacity"].update(pages=0), "header: capacity = .* must be"),
    "capacity field": (lambda d, a: d["header"]["capacity"].pop("pages"), "header: capacity = .* must be"),
    "stages": (set_header(stages={"core": 2}), "header: stages = .* must be"),
    "fingerprint": (set_header(fingerprint={"torch": [2]}), "header: fingerprint = .* must be"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_well_signed_file_of_another_form_is_refused(data, name):
    """The digest is made anew: it proves that a file is whole, not that it means something."""
    change, message = FORGERIES[name]
    with pytest.raises(RuntimeError, match=message):
        decode(forge(data, change))


def sign(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def with_text(data: bytes, text: bytes) -> bytes:
    length = int.from_bytes(data[12:20], "little")
    return sign(data[:12] + len(text).to_bytes(8, "little") + text + data[20 + length:-32])


def test_json_that_is_not_as_written_is_refused(data):
    described, _ = take_apart(data)
    text = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    assert with_text(data, text) == data
    spaced = json.dumps(described, sort_keys=True).encode()
    twice = text.replace(b'"greedy":false', b'"greedy":true,"greedy":false')
    for other, message in ((spaced, "not in the form"), (twice, "not in the form"), (text[:-1], "damaged"),
                           (b"\xff" + text[1:], "damaged"), (b"[]", "must be an object"),
                           (b"1" * 5000, "damaged")):
        with pytest.raises(RuntimeError, match=message):
            decode(with_text(data, other))


def test_bytes_after_the_last_array_are_refused(data):
    with pytest.raises(RuntimeError, match="3 bytes are left over"):
        decode(sign(data[:-32] + b"abc"))
    described, _ = take_apart(data)
    described["arrays"][-1][2] += 1
    text = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(RuntimeError, match="readout_kind reaches beyond the end"):
        decode(with_text(data, text))


def test_a_span_off_its_frontier_is_never_written(log):
    """A start is not stored: writing another one would lose it in silence."""
    place, event = next((i, e) for i, e in enumerate(log.events) if isinstance(e, Pass))
    span = event.spans[0]
    moved = event._replace(spans=(Span(span.sequence, span.loop, span.start + 1, span.stop + 1), *event.spans[1:]))
    with pytest.raises(AssertionError, match="does not start where"):
        encode(replace(log, events=(*log.events[:place], moved, *log.events[place + 1:])))


def test_a_value_too_large_for_its_array_is_an_error(log):
    place, event = next((i, e) for i, e in enumerate(log.events) if isinstance(e, Pass))
    events = (*log.events[:place], event._replace(padded_rows=65536), *log.events[place + 1:])
    with pytest.raises(ValueError, match="does not fit the log format"):
        encode(replace(log, events=events))


def growth(batch, schedule):
    """Bytes, spans and tokens that a longer response adds to a log of `batch` sequences."""
    logs = [rollout_log(schedule, count=batch, new=new, stop_ids=(), capacity=Capacity(max_sequences=batch))[1]
            for new in (16, 32)]
    short, long = ((len(encode(log)), statistics(log).spans, log.token_count) for log in logs)
    return tuple(b - a for a, b in zip(short, long, strict=True))


@pytest.mark.parametrize(("batch", "schedule", "most"), [
    (1, "dense", 20), (1, "exit:2", 19), (1, "exit:1", 20), (8, "dense", 10), (8, "exit:periodic=1,3", 12)])
def test_size_in_steady_state(batch, schedule, most):
    """A pass has 9 bytes, a span 7, a read-out 3; apart from them a token has 10 of its own.

    In the header the numbers of entries take a few digits more.
    """
    size, spans, tokens = growth(batch, schedule)
    assert (size - 10 * tokens - 20) / spans < most


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path, log, data, monkeypatch):
    path = tmp_path / "a.log"
    write_log(log, path)
    assert path.read_bytes() == data and [p.name for p in tmp_path.iterdir()] == ["a.log"]
    assert read_log(path) == log

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr("rollout.log.os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_log(rollout_log(seed=9)[1], path)
    assert path.read_bytes() == data


def test_errors_of_a_file_name_it(tmp_path, data):
    path = tmp_path / "a.log"
    with pytest.raises(ValueError, match=r"a\.log does not exist"):
        read_log(path)
    with pytest.raises(ValueError, match="is a folder"):
        read_log(tmp_path)
    path.write_bytes(data[:-1])
    with pytest.raises(RuntimeError, match=r"log .*a\.log: altered or cut short"):
        read_log(path)


def test_the_reader_in_the_document_reads_logs(tmp_path, capsys):
    """docs/schedule-log.md holds a reader without this project's code; it must stay true."""
    text = DOCUMENT.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code.splitlines()) <= 30
    for schedule in ("dense", "exit:periodic=1,3"):
        _, log = rollout_log(schedule, dtype=torch.bfloat16)
        write_log(log, tmp_path / "schedule.log")
        scope = {}
        exec(compile(code, str(DOCUMENT), "exec"), scope)
        described, sequences, events = scope["read"](tmp_path / "schedule.log")
        assert described["header"] == log.header
        for found, completion in zip(sequences, log.completions, strict=True):
            assert found["uid"] == completion.request.uid and found["finish_reason"] == completion.finish_reason
            assert (*found["prompt_ids"], *found["response_ids"]) == completion.request.prompt + completion.token_ids
            assert tuple(found["logprobs"]) == completion.logprobs
            assert tuple(found["exit_depths"]) == completion.exit_depths
        assert [e[0] for e in events] == [type(e).__name__.lower() for e in log.events]
        passes = [event for event in events if event[0] == "pass"]
        assert [list(map(tuple, event[1])) for event in passes] == [
            list(map(tuple, e.spans)) for e in log.events if isinstance(e, Pass)]
        assert [event[2:] for event in passes] == [
            ([r.row for r in e.readouts], e.padded_rows, e.head_rows) for e in log.events if isinstance(e, Pass)]


def test_the_document_lists_every_array():
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, kind in ARRAYS.items():
        assert re.search(rf"\| `{name}` \| `{re.escape(kind)}` \|", text), name
    for name in FIELDS:
        assert f"`{name}`" in text, name
    assert repr(MAGIC.decode())[1:-1] in text



def test_the_groups_of_version_2_are_those_of_the_document():
    """Shapes decide bits: whoever changes the grouping raises its version, here and in the document."""
    assert groups.VERSION == 2 and "(`groups`: 2," in DOCUMENT.read_text(encoding="utf-8")
    ends = [(1, 1), (4, 64), (5, 64), (2, 65), (1, 64), (16, 64), (17, 64), (3, 129), (1, 256), (64, 64)]
    spans = np.array([(0, 1, stop - n, stop) for n, stop in ends])
    keys = -(-spans[:, 3] // 16) * 16
    layout = groups.Layout(np.zeros((1, 1, 99), dtype=np.int64), np.array([[200]]), 16)
    assert [found for found, _ in groups.buckets(spans, keys, layout)] == [[0, 4], [8], [1], [3], [7], [2, 5], [6, 9]]
    layout = layout._replace(room=np.array([[300]]), in_place_from=80)
    assert groups.buckets(spans, keys, layout)[:4] == [([0, 4], True), ([8], True), ([1], True), ([3], True)]
    assert [key_length(count) for count in (1, 64, 65, 193, 256, 257, 385, 512, 513, 1025, 2048)] == [
        64, 64, 128, 256, 256, 384, 512, 512, 768, 1536, 2048]
    assert pieces(60, 75, 8) == [(60, 64, 64), (64, 72, 128), (72, 75, 128)]
