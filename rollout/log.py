"""The schedule log: one file a cohort, everything needed to execute the rollout again.

The byte layout is described in `docs/schedule-log.md` for readers in other languages.
Reading is strict: an unknown version or field, a cut or altered file, a byte left over, or
anything that `encode` would have written otherwise is a RuntimeError that says which. This
file checks form; `rollout/structure.py` checks that the events make sense.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.engine import Completion, Request, Rollout
from engine.plan import Admit, Event, Finish, Pass, Readout, Span
from models.files import replacing
from rollout.header import check_header, check_keys, is_integer

MAGIC = b"REPRISE\n"
FORMAT = 2
PREFIX = struct.Struct("<8sIQ")  # magic, format version, length of the JSON part
DIGEST_BYTES = 32

ADMIT, PASS, FINISH = 0, 1, 2
FINAL = 0  # the one kind of read-out so far

# Name -> little-endian dtype, in file order.
ARRAYS = {
    "uid": "<u8", "prompt_length": "<u4", "response_length": "<u4", "prompt_ids": "<u4",
    "response_ids": "<u4", "trained": "<u1", "exit_depths": "<u1", "logprobs": "<f4",
    "event_kind": "<u1", "event_sequence": "<u4",
    "pass_spans": "<u2", "pass_rows": "<u2", "pass_readouts": "<u2", "pass_head_rows": "<u2",
    "span_sequence": "<u4", "span_stage": "<u1", "span_rows": "<u2",
    "readout_row": "<u2", "readout_kind": "<u1",
}
SEQUENCE_FIELDS = ("dataset", "example", "group", "sample", "max_new_tokens", "finish_reason",
                   "stop_id")
JSON_FIELDS = ("arrays", "header", "peak_catch_up", "sequence_fields", "sequences")


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
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(encode(log))
        file.flush()
        os.fsync(file.fileno())


def read_log(path: str | Path) -> ScheduleLog:
    """Read a log. RuntimeError says what is wrong with the file, ValueError that there is none."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"log {path} does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"log {path} is a folder; name the file in it") from None
    try:
        return decode(data)
    except RuntimeError as error:
        raise RuntimeError(f"log {path}: {error}") from None


def encode(log: ScheduleLog) -> bytes:
    """The bytes of a log, digest included.

    Errors: ValueError for a value that its array cannot hold, AssertionError for a span that
    does not start where its sequence's cells at that loop end (a start is not written).
    """
    columns = _sequence_columns(log) | _event_columns(log.events)
    try:
        arrays = {name: np.array(columns[name], dtype=kind) for name, kind in ARRAYS.items()}
    except OverflowError as error:
        raise ValueError(f"a value of this run does not fit the log format ({error}): passes are "
                         "limited to 65,535 rows; lower max_rows") from None
    sequences = [[c.request.dataset, c.request.example, c.request.group, c.request.sample,
                  c.request.max_new_tokens, c.finish_reason, c.stop_id] for c in log.completions]
    described = {"header": log.header, "sequence_fields": list(SEQUENCE_FIELDS),
                 "sequences": sequences, "peak_catch_up": log.peak_catch_up,
                 "arrays": [[name, kind, len(arrays[name])] for name, kind in ARRAYS.items()]}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    body = b"".join([PREFIX.pack(MAGIC, FORMAT, len(text)), text,
                     *(array.tobytes() for array in arrays.values())])
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
    except ValueError as error:
        raise RuntimeError(f"the JSON part is damaged: {error}") from None
    check_keys("the JSON part", described, JSON_FIELDS)
    check_header(described["header"])
    _check_described(described)
    log = _assemble(described, _Columns(_split(body, PREFIX.size + length, described["arrays"])))
    if encode(log) != data:
        raise RuntimeError("not in the form in which logs are written (the same contents encode to "
                           "other bytes)")
    return log


def _check_described(described: dict) -> None:
    if described["sequence_fields"] != list(SEQUENCE_FIELDS):
        raise RuntimeError(f"unknown sequence fields {described['sequence_fields']}")
    if not is_integer(described["peak_catch_up"]):
        raise RuntimeError(f"peak_catch_up = {described['peak_catch_up']!r} must be an integer from 0")
    arrays, sequences = described["arrays"], described["sequences"]
    if not (isinstance(arrays, list) and all(isinstance(e, list) and len(e) == 3 for e in arrays)
            and [entry[:2] for entry in arrays] == [[name, kind] for name, kind in ARRAYS.items()]
            and all(is_integer(count) for _, _, count in arrays)):
        raise RuntimeError("unknown or missing arrays")
    if not isinstance(sequences, list):
        raise RuntimeError("sequences must be a list")
    for number, entry in enumerate(sequences):
        well_formed = isinstance(entry, list) and len(entry) == len(SEQUENCE_FIELDS) and (
            all(isinstance(entry[i], str) for i in (0, 1, 5)) and is_integer(entry[4], 1)
            and all(is_integer(entry[i], -2**63) for i in (2, 3))
            and (entry[6] is None or is_integer(entry[6])))
        if not well_formed:
            raise RuntimeError(f"sequence {number}: its fields {str(entry)[:200]} are malformed")


def _split(body: bytes, offset: int, described: list) -> dict[str, list]:
    arrays = {}
    for name, kind, count in described:
        end = offset + np.dtype(kind).itemsize * count
        if end > len(body):
            raise RuntimeError(f"array {name} reaches beyond the end of the file")
        arrays[name] = np.frombuffer(body[offset:end], dtype=kind).tolist()
        offset = end
    if offset != len(body):
        raise RuntimeError(f"{len(body) - offset} bytes are left over after the last array")
    return arrays


def _sequence_columns(log: ScheduleLog) -> dict[str, list]:
    done = log.completions
    return {
        "uid": [c.request.uid for c in done],
        "prompt_length": [len(c.request.prompt) for c in done],
        "response_length": [len(c.token_ids) for c in done],
        "prompt_ids": [token for c in done for token in c.request.prompt],
        "response_ids": [token for c in done for token in c.token_ids],
        "trained": [flag for flags in log.trained for flag in flags],
        "exit_depths": [depth for c in done for depth in c.exit_depths],
        "logprobs": [value for c in done for value in c.logprobs],
    }


def _event_columns(events: Sequence[Event]) -> dict[str, list]:
    passes = [event for event in events if isinstance(event, Pass)]
    spans = [span for event in passes for span in event.spans]
    ends: dict[tuple[int, int], int] = {}
    for span in spans:
        sequence, loop, start, stop = span
        if ends.get((sequence, loop), 0) != start:
            raise AssertionError(f"{span} does not start where its cells end, {ends.get((sequence, loop), 0)}")
        ends[sequence, loop] = stop
    readouts = [readout.row for event in passes for readout in event.readouts]
    return {
        "event_kind": [PASS if isinstance(e, Pass) else ADMIT if isinstance(e, Admit) else FINISH
                       for e in events],
        "event_sequence": [event.sequence for event in events if not isinstance(event, Pass)],
        "pass_spans": [len(event.spans) for event in passes],
        "pass_rows": [event.padded_rows for event in passes],
        "pass_readouts": [len(event.readouts) for event in passes],
        "pass_head_rows": [event.head_rows for event in passes],
        "span_sequence": [span.sequence for span in spans],
        "span_stage": [span.loop for span in spans],
        "span_rows": [span.stop - span.start for span in spans],
        "readout_row": readouts, "readout_kind": [FINAL] * len(readouts),
    }


class _Columns:
    """Hands the arrays' entries out in order and knows whether all were taken."""

    def __init__(self, values: dict[str, list]):
        self.values = values
        self.taken = dict.fromkeys(values, 0)
        self.ends: dict[tuple[int, int], int] = {}  # cells of each (sequence, loop) so far

    def take(self, name: str, count: int) -> tuple:
        start = self.taken[name]
        self.taken[name] = start + count
        if self.taken[name] > len(self.values[name]):
            raise RuntimeError(f"array {name} is too short for what refers to it")
        return tuple(self.values[name][start:start + count])

    def one(self, name: str):
        return self.take(name, 1)[0]

    def check_all_taken(self) -> None:
        for name, values in self.values.items():
            if self.taken[name] != len(values):
                raise RuntimeError(f"array {name}: {len(values) - self.taken[name]} entries that "
                                   "nothing refers to")


def _assemble(described: dict, columns: _Columns) -> ScheduleLog:
    completions, trained = [], []
    for dataset, example, group, sample, max_new, reason, stop_id in described["sequences"]:
        prompt, response = columns.one("prompt_length"), columns.one("response_length")
        request = Request(columns.take("prompt_ids", prompt), max_new, columns.one("uid"), dataset,
                          example, group, sample)
        trained.append(tuple(map(bool, columns.take("trained", response))))
        completions.append(Completion(
            request, columns.take("response_ids", response), columns.take("logprobs", response),
            columns.take("exit_depths", response), reason, stop_id))
    kinds = columns.take("event_kind", len(columns.values["event_kind"]))
    events = tuple(_event(kind, columns) for kind in kinds)
    columns.check_all_taken()
    return ScheduleLog(described["header"], tuple(completions), tuple(trained), events,
                       described["peak_catch_up"])


def _event(kind: int, columns: _Columns) -> Event:
    if kind in (ADMIT, FINISH):
        return (Admit if kind == ADMIT else Finish)(columns.one("event_sequence"))
    if kind != PASS:
        raise RuntimeError(f"event kind {kind} is unknown")
    count, rows = columns.one("pass_spans"), columns.one("pass_rows")
    readouts, head = columns.one("pass_readouts"), columns.one("pass_head_rows")
    spans, places = [], []
    for sequence, loop, wide in zip(*(columns.take(name, count) for name in (
            "span_sequence", "span_stage", "span_rows")), strict=True):
        start = columns.ends.get((sequence, loop), 0)
        columns.ends[sequence, loop] = start + wide
        spans.append(Span(sequence, loop, start, start + wide))
        places += [(sequence, position, loop) for position in range(start, start + wide)]
    if any(found != FINAL for found in columns.take("readout_kind", readouts)):
        raise RuntimeError("a read-out kind is unknown")
    rows_read = columns.take("readout_row", readouts)
    if any(row >= len(places) for row in rows_read):
        raise RuntimeError("a read-out names a row that its pass does not have")
    return Pass(tuple(spans), rows, tuple(Readout(row, *places[row]) for row in rows_read), head)
