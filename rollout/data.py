"""Prompts with their answers, from JSONL, parquet or the hub, as frozen records.

A data set is read whole and checked whole before anything runs: a bad line, a missing field or
an id that occurs twice is an error that names the row. The order of an epoch and the uid of a
sample are pure functions of keys; no generator state exists that a resume could lose.

This module knows no task, no tokenizer and no reward.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path

from rollout.sources import read_rows


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        id: unique within its data set.
        prompt: text, or chat messages ({"role": ..., "content": ...}, both text).
        answer: what the reward compares with; "" where the data has none.
        fields: the row's other columns, for rewards that want them.
    """

    id: str
    prompt: str | list[dict]
    answer: str
    fields: dict


@dataclass(frozen=True)
class DataSet:
    """A checked list of examples.

    Attributes:
        name: part of every sample's uid, so it must not depend on where the file lies: two sets
            used in one run need two names.
        examples: in the order of the file, ids unique.
        digest: sha256 over all examples (hex); a resumed run must find the same one.
    """

    name: str
    examples: tuple[Example, ...]
    digest: str


def load_data(spec: str | Path, *, split: str = "train", prompt_field: str = "prompt",
              answer_field: str | None = "answer", id_field: str = "id", limit: int | None = None,
              name: str | None = None) -> DataSet:
    """Read the data set that `spec` names.

    Args:
        spec: a .jsonl or .parquet file; a folder that holds `{split}.jsonl` or `{split}.parquet`;
            or a hub name, with a configuration behind a colon ("openai/gsm8k:main").
        split: which split of a folder or hub name; a file is one split and is read whole.
        prompt_field, id_field: columns. Without a column "id" the ids are row numbers from 0; an
            `id_field` of another name must exist.
        answer_field: column of text or numbers; None for data without answers.
        limit: the first so many rows only.
        name: name of the set; default: the file's without its suffix, or hub name and split.

    Errors: ValueError naming file and row, or all that was tried.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: give at least 1, or leave it out to read every row")
    default_name, rows = read_rows(spec, split)
    rows = rows[:limit]
    if id_field == "id" and not any("id" in row for _, row in rows):
        ids = [str(number) for number in range(len(rows))]
    else:
        ids = [_identity(where, row, id_field) for where, row in rows]
    taken = (prompt_field, answer_field, id_field)
    examples = [Example(id=identity, prompt=_prompt(where, row, prompt_field),
                        answer=_answer(where, row, answer_field),
                        fields={column: value for column, value in row.items() if column not in taken})
                for identity, (where, row) in zip(ids, rows, strict=True)]
    return make_data(name or default_name, examples, [where for where, _ in rows])


def make_data(name: str, examples: Sequence[Example], places: Sequence[str] | None = None) -> DataSet:
    """A data set of `examples`: checks that ids are unique and forms the digest.

    Args:
        places: where each example comes from, for errors; default: its position.
    """
    if not examples:
        raise ValueError(f"data set {name!r} has no examples")
    places = places or [f"{name} row {number}" for number in range(len(examples))]
    first: dict[str, str] = {}
    digest = hashlib.sha256()
    for where, example in zip(places, examples, strict=True):
        if example.id in first:
            raise ValueError(f"id {example.id!r} occurs twice: {first[example.id]} and {where}; "
                             "ids must be unique, since a sample's random numbers are keyed by them")
        first[example.id] = where
        digest.update(_canonical(where, example))
    return DataSet(name=name, examples=tuple(examples), digest=digest.hexdigest())


def fit_prompts(data: DataSet, encode: Callable[[Example], list[int]], max_tokens: int,
                policy: str = "error") -> tuple[list[tuple[Example, list[int]]], int]:
    """Encode every prompt and keep those of at most `max_tokens` ids.

    Args:
        encode: ids of one example's prompt.
        policy: what becomes of longer ones: "error" names the first, "skip" leaves them out. No
            prompt is ever cut.

    Returns: (example, prompt ids) in the data's order, and how many were left out.
    Errors: ValueError for a prompt of no ids, a longer one under "error", or nothing left.
    """
    if policy not in ("error", "skip"):
        raise ValueError(f"policy for too long prompts = {policy!r}; choose 'error' or 'skip'")
    kept, lengths = [], []
    for example in data.examples:
        ids = encode(example)
        if not ids:
            raise ValueError(f"data set {data.name!r}: the prompt of example {example.id!r} encodes to no tokens")
        lengths.append(len(ids))
        if len(ids) <= max_tokens:
            kept.append((example, ids))
        elif policy == "error":
            raise ValueError(f"data set {data.name!r}: the prompt of example {example.id!r} has {len(ids)} tokens, "
                             f"more than {max_tokens}; raise the limit, or choose the policy 'skip'")
    if not kept:
        raise ValueError(f"data set {data.name!r}: every one of {len(lengths)} prompts is longer than {max_tokens} "
                         f"tokens (the shortest has {min(lengths)}); raise the limit")
    return kept, len(lengths) - len(kept)


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` examples in an epoch: a permutation of range(count).

    Example i is sorted by a hash of (seed, epoch, i), so any epoch can be written down without
    the ones before it. `seed` is the data seed; the sampling seed does not enter.
    """
    return sorted(range(count), key=lambda index: (_hash64("order", seed, epoch, index), index))


def uid(step: int, data_name: str, example_id: str, sample_index: int) -> int:
    """64-bit id of a sample, 0 <= uid < 2**64: the key of its random numbers, unique in a run.

    Args:
        step: the optimizer step that the sample is made for.
        sample_index: its place among the samples of the same prompt.
    """
    return _hash64("uid", step, data_name, example_id, sample_index)


def _hash64(*parts: str | int) -> int:
    """blake2b-8 over the parts, each with its length in front: ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def _identity(where: str, row: dict, field: str) -> str:
    found = _column(where, row, field, "id_field")
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise ValueError(f"{where}: {field} = {found!r}; an id is a non-empty text or an integer")
    return str(found)


def _prompt(where: str, row: dict, field: str) -> str | list[dict]:
    found = _column(where, row, field, "prompt_field")
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(_is_message(message) for message in found):
        return found
    raise ValueError(f"{where}: {field} = {str(found)[:80]!r}; a prompt is a non-empty text or a list of messages "
                     "with the texts 'role' and 'content'")


def _is_message(message: object) -> bool:
    return (isinstance(message, dict) and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str))


def _answer(where: str, row: dict, field: str | None) -> str:
    if field is None:
        return ""
    found = _column(where, row, field, "answer_field")
    number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if not number and not isinstance(found, str):
        raise ValueError(f"{where}: {field} = {str(found)[:80]!r}; an answer is a text or a finite number")
    return str(found)


def _column(where: str, row: dict, field: str, option: str) -> object:
    if field not in row:
        raise ValueError(f"{where}: has no field {field!r}, only {', '.join(map(repr, row))}; "
                         f"name another with {option}")
    return row[field]


def _canonical(where: str, example: Example) -> bytes:
    """The bytes of an example that enter the digest."""

    def plain(value):
        if isinstance(value, date | time | Decimal):
            return str(value)
        if isinstance(value, bytes):
            return value.hex()
        raise ValueError(f"{where}: a field holds a {type(value).__name__}; only text, numbers, lists, objects, dates "
                         "and bytes are supported: drop that column")

    record = [example.id, example.prompt, example.answer, example.fields]
    return json.dumps(record, ensure_ascii=True, sort_keys=True, default=plain).encode() + b"\n"
