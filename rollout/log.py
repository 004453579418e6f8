"""The schedule log: one file a cohort, everything needed to execute the rollout again.

The byte layout is described in `docs/schedule-log.md` for readers in other languages.
Reading is strict: an unknown version or field, a cut or altered file, or a byte left over
is a RuntimeError that says which. This file checks form; `rollout/structure.py` checks that
the events make sense.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.engine import Completion, Request, Rollout
from engine.plan import Admit, Event, Finish, Pass, Readout, Span

MAGIC = b"REPRISE\n"
FORMAT = 1
PREFIX = struct.Struct("<8sIQ")  # magic, format version, length of the JSON part
DIGEST_BYTES = 32

KINDS = {"admit": 0, "pass": 1, "finish": 2}
FINAL = 0  # the one kind of read-out so far

# Name -> little-endian dtype, in file order.
ARRAYS = {
    "uid": "<u8", "prompt_length": "<u4", "response_length": "<u4", "prompt_ids": "<u4",
    "response_ids": "<u4", "trained": "<u1", "exit_depths": "<u1", "logprobs": "<f4",
    "event_kind": "<u1", "event_sequence": "<u4",
    "pass_spans": "<u2", "pass_rows": "<u2", "pass_readouts": "<u2", "pass_head_rows": "<u2",
    "span_sequence": "<u4", "span_stage": "<u1", "span_start": "<u4", "span_rows": "<u2",
    "readout_row": "<u2", "readout_kind": "<u1",
}
HEADER_KEYS = frozenset({
    "policy_version", "weights", "family", "loops", "stages", "vocab", "dtype", "profile",
    "numerics", "linear", "attention", "fingerprint", "seed", "temperature", "greedy", "stop_ids",
    "stop_strings", "schedule", "catch_up", "capacity", "derived"})
SEQUENCE_KEYS = ("dataset", "example", "group", "sample", "max_new_tokens", "finish_reason",
                 "stop_id")


@dataclass(frozen=True)
class ScheduleLog:
    """A log in memory.

    Attributes:
        header: plain values that decide bits (see `Engine.header`).
        completions: prompt, response, depths, log-probs of every sequence, by number.
        trained: for every sequence, whether each response token is trained on.
        events: admit, pass and finish events in order.
        peak_catch_up: most older cells that one span ran for a newer position.
    """

    header: dict
    completions: tuple[Completion, ...]
    trained: tuple[tuple[bool, ...], ...]
    events: tuple[Event, ...]
    peak_catch_up: int = 0

    @property
    def token_count(self) -> int:
        """Response tokens of all sequences."""
        return sum(len(c.token_ids) for c in self.completions)


def from_rollout(rollout: Rollout) -> ScheduleLog:
    """The log of an engine run; every response token is trained on."""
    trained = tuple((True,) * len(c.token_ids) for c in rollout.completions)
    return ScheduleLog(rollout.header, rollout.completions, trained, rollout.events,
                       rollout.peak_catch_up)


def write_log(log: ScheduleLog, path: str | Path) -> None:
    """Write to a temporary name, then rename. The same log always gives the same bytes."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(encode(log))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_log(path: str | Path) -> ScheduleLog:
    """Read a log. RuntimeError says what is wrong with the file."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"log {path} does not exist") from None
    try:
        return decode(data)
    except RuntimeError as error:
        raise RuntimeError(f"log {path}: {error}") from None


def encode(log: ScheduleLog) -> bytes:
    """The bytes of a log, digest included."""
    arrays = _to_arrays(log)
    sequences = [[c.request.dataset, c.request.example, c.request.group, c.request.sample,
                  c.request.max_new_tokens, c.finish_reason, c.stop_id] for c in log.completions]
    described = {"header": log.header, "sequence_fields": list(SEQUENCE_KEYS),
                 "sequences": sequences, "peak_catch_up": log.peak_catch_up,
                 "arrays": [[name, ARRAYS[name], len(arrays[name])] for name in ARRAYS]}
    text = json.dumps(described, ensure_ascii=False, sort_keys=True,
                      separators=(",", ":")).encode()
    body = b"".join([PREFIX.pack(MAGIC, FORMAT, len(text)), text,
                     *(arrays[name].tobytes() for name in ARRAYS)])
    return body + hashlib.sha256(body).digest()


def decode(data: bytes) -> ScheduleLog:
    """The inverse of `encode`. RuntimeError on anything that `encode` would not write."""
    if len(data) < PREFIX.size + DIGEST_BYTES:
        raise RuntimeError(f"cut short: {len(data)} bytes are fewer than any log has")
    magic, version, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RuntimeError("not a schedule log (wrong first bytes)")
    if version != FORMAT:
        raise RuntimeError(f"format version {version} is unknown; this program reads {FORMAT}")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise RuntimeError("altered or cut short: the digest does not match the contents")
    try:
        described = json.loads(body[PREFIX.size:PREFIX.size + length])
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RuntimeError(f"the JSON part is damaged: {error}") from None
    _expect_keys("the JSON part", described, {"header", "sequence_fields", "sequences", "arrays",
                                              "peak_catch_up"})
    _expect_keys("the header", described["header"], HEADER_KEYS)
    if described["sequence_fields"] != list(SEQUENCE_KEYS):
        raise RuntimeError(f"unknown sequence fields {described['sequence_fields']}")
    arrays = _split(body, PREFIX.size + length, described["arrays"])
    return _from_arrays(described, arrays)


def _expect_keys(where: str, found: dict, wanted) -> None:
    if not isinstance(found, dict) or set(found) != set(wanted):
        odd = sorted(set(found) ^ set(wanted)) if isinstance(found, dict) else [type(found).__name__]
        raise RuntimeError(f"{where} has unknown or missing fields: {', '.join(odd)}")


def _split(body: bytes, offset: int, described: list) -> dict[str, np.ndarray]:
    if [entry[:2] for entry in described] != [[name, kind] for name, kind in ARRAYS.items()]:
        raise RuntimeError("unknown or missing arrays")
    arrays = {}
    for name, kind, count in described:
        end = offset + np.dtype(kind).itemsize * count
        if count < 0 or end > len(body):
            raise RuntimeError(f"array {name} reaches beyond the end of the file")
        arrays[name] = np.frombuffer(body[offset:end], dtype=kind)
        offset = end
    if offset != len(body):
        raise RuntimeError(f"{len(body) - offset} bytes are left over after the last array")
    return arrays


def _to_arrays(log: ScheduleLog) -> dict[str, np.ndarray]:
    columns: dict[str, list] = {name: [] for name in ARRAYS}

    def put(**values) -> None:
        for name, value in values.items():
            columns[name].append(value)

    for completion, trained in zip(log.completions, log.trained, strict=True):
        put(uid=completion.request.uid, prompt_length=len(completion.request.prompt),
            response_length=len(completion.token_ids))
        columns["prompt_ids"] += completion.request.prompt
        columns["response_ids"] += completion.token_ids
        columns["trained"] += trained
        columns["exit_depths"] += completion.exit_depths
        columns["logprobs"] += completion.logprobs
    for event in log.events:
        if isinstance(event, Pass):
            put(event_kind=KINDS["pass"], pass_spans=len(event.spans), pass_rows=event.padded_rows,
                pass_readouts=len(event.readouts), pass_head_rows=event.head_rows)
            for sequence, loop, start, stop in event.spans:
                put(span_sequence=sequence, span_stage=loop, span_start=start, span_rows=stop - start)
            for readout in event.readouts:
                put(readout_row=readout.row, readout_kind=FINAL)
        else:
            put(event_kind=KINDS["admit" if isinstance(event, Admit) else "finish"],
                event_sequence=event.sequence)
    try:
        return {name: np.array(column, dtype=ARRAYS[name]) for name, column in columns.items()}
    except OverflowError as error:
        raise ValueError(f"a value does not fit the log format ({error}): passes are limited to "
                         "65,535 rows; lower max_rows") from None


def _from_arrays(described: dict, arrays: dict[str, np.ndarray]) -> ScheduleLog:
    taken = {name: 0 for name in ARRAYS}
    values = {name: array.tolist() for name, array in arrays.items()}

    def take(name: str, count: int = 1) -> list:
        start = taken[name]
        taken[name] = start + count
        if taken[name] > len(values[name]):
            raise RuntimeError(f"array {name} is too short for what refers to it")
        return values[name][start:start + count]

    completions, trained = [], []
    for entry in described["sequences"]:
        if len(entry) != len(SEQUENCE_KEYS):
            raise RuntimeError("a sequence entry has the wrong number of fields")
        dataset, example, group, sample, max_new, reason, stop_id = entry
        [uid], [prompt], [response] = take("uid"), take("prompt_length"), take("response_length")
        request = Request(tuple(take("prompt_ids", prompt)), max_new, uid, dataset, example, group,
                          sample)
        trained.append(tuple(map(bool, take("trained", response))))
        completions.append(Completion(
            request, tuple(take("response_ids", response)), tuple(take("logprobs", response)),
            tuple(take("exit_depths", response)), reason, stop_id))
    events = [_event(kind, take) for kind in take("event_kind", len(values["event_kind"]))]
    for name, array in values.items():
        if taken[name] != len(array):
            raise RuntimeError(f"array {name}: {len(array) - taken[name]} entries that nothing "
                               "refers to")
    return ScheduleLog(described["header"], tuple(completions), tuple(trained), tuple(events),
                       described["peak_catch_up"])


def _event(kind: int, take) -> Event:
    if kind == KINDS["admit"]:
        return Admit(*take("event_sequence"))
    if kind == KINDS["finish"]:
        return Finish(*take("event_sequence"))
    if kind != KINDS["pass"]:
        raise RuntimeError(f"event kind {kind} is unknown")
    [spans], [rows] = take("pass_spans"), take("pass_rows")
    [readouts], [head] = take("pass_readouts"), take("pass_head_rows")
    columns = (take(name, spans) for name in ("span_sequence", "span_stage", "span_start",
                                              "span_rows"))
    found = tuple(Span(sequence, loop, start, start + count)
                  for sequence, loop, start, count in zip(*columns))
    if any(kind != FINAL for kind in take("readout_kind", readouts)):
        raise RuntimeError("a read-out kind is unknown")
    places = [(span.sequence, position, span.loop) for span in found
              for position in range(span.start, span.stop)]
    rows_read = take("readout_row", readouts)
    if any(row >= len(places) for row in rows_read):
        raise RuntimeError("a read-out names a row that its pass does not have")
    return Pass(found, rows, tuple(Readout(row, *places[row]) for row in rows_read), head)
