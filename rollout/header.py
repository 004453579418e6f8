"""The header of a schedule log: its fields and what each may hold.

Form only: whether a schedule's text parses, or a model agrees, is checked by those who use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields

from engine.plan import Capacity
from models.numerics import DTYPES
from models.rounding import PROFILES

Check = tuple[str, Callable[[object], bool]]  # what is expected, and the test


def is_integer(value: object, low: int = 0, high: int = 2**64 - 1) -> bool:
    """Whether `value` is an integer (not a bool) within low..high."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _one_of(*names: str) -> Check:
    return "one of " + ", ".join(names), lambda value: isinstance(value, str) and value in names


def _list_of(what: str, test: Callable[[object], bool]) -> Check:
    return f"a list of {what}", lambda value: isinstance(value, list) and all(map(test, value))


def _integers(low: int, *names: str) -> Check:
    return (f"an object of integers from {low}: {', '.join(names)}",
            lambda value: isinstance(value, dict) and set(value) == set(names)
            and all(is_integer(number, low) for number in value.values()))


NATURAL: Check = ("an integer from 0", is_integer)
POSITIVE: Check = ("an integer from 1", lambda value: is_integer(value, 1))
TEXT: Check = ("a text", _is_text)

FIELDS: dict[str, Check] = {
    "policy_version": NATURAL,
    "weights": ("a sha256 in hex", lambda value: _is_text(value) and re.fullmatch("[0-9a-f]{64}", value)),
    "family": TEXT,
    "loops": ("an integer in 1..255", lambda value: is_integer(value, 1, 255)),
    "stages": _integers(0, "prelude", "core", "coda"),
    "vocab": POSITIVE,
    "dtype": _one_of(*DTYPES),
    "profile": _one_of(*PROFILES),
    "numerics": TEXT, "linear": TEXT, "attention": TEXT,
    "rule": ("an object of integers: the shape rule, or none", lambda value: isinstance(value, dict) and all(
        is_integer(entry, 1) for entry in value.values())),
    "fingerprint": ("an object of texts and integers", lambda value: isinstance(value, dict) and all(
        _is_text(entry) or is_integer(entry) for entry in value.values())),
    "seed": NATURAL,
    "temperature": ("a finite number above 0", lambda value: isinstance(value, int | float)
                    and not isinstance(value, bool) and 0 < value < float("inf")),
    "greedy": ("true or false", lambda value: isinstance(value, bool)),
    "top_k": NATURAL,
    "top_p": ("a number above 0, at most 1", lambda value: isinstance(value, int | float)
              and not isinstance(value, bool) and 0 < value <= 1),
    "stop_ids": _list_of("token ids", is_integer),
    "stop_strings": _list_of("texts", lambda value: _is_text(value) and value != ""),
    "schedule": TEXT, "catch_up": TEXT,
    "capacity": _integers(1, *(field.name for field in fields(Capacity))),
    "derived": ("an object of integers", lambda value: isinstance(value, dict) and all(
        is_integer(entry) for entry in value.values())),
}


def check_header(header: object) -> None:
    """RuntimeError naming an unknown, missing or malformed field."""
    check_keys("the header", header, FIELDS)
    for name, (expected, test) in FIELDS.items():
        if not test(header[name]):
            raise RuntimeError(f"header: {name} = {header[name]!r} must be {expected}")


def check_keys(where: str, found: object, wanted) -> None:
    """RuntimeError unless `found` is an object with exactly these keys."""
    if not isinstance(found, dict):
        raise RuntimeError(f"{where} must be an object, not {type(found).__name__}")
    if set(found) != set(wanted):
        odd = sorted(set(found) ^ set(wanted))
        raise RuntimeError(f"{where} has unknown or missing fields: {', '.join(map(str, odd))}")
