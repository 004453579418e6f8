"""Typed settings: values of dataclass fields from text and from TOML, and their check.

Knows annotations (bool, int, float, str, Literal, unions, tuples), not what a setting means.
Conversion never fails: what does not fit stays as it is and `mismatch` says so, so that a value
given in Python, in a file or on the command line is refused in the same words.
"""

from __future__ import annotations

import tomllib
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@cache
def kinds(section: type) -> dict[str, Any]:
    """Field name -> annotation of a dataclass, in order."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def leaves(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> annotation of every setting below a dataclass, nested dataclasses opened."""
    found: dict[str, Any] = {}
    for name, kind in kinds(section).items():
        dotted = f"{prefix}.{name}" if prefix else name
        found.update(leaves(kind, dotted) if is_dataclass(kind) else {dotted: kind})
    return found


def from_text(text: str, kind: Any) -> Any:
    """The value that `text`, from a command line, means for a setting of this kind."""
    if _is_union(kind):
        if type(None) in get_args(kind) and text == "none":
            return None
        converted = (from_text(text, member) for member in get_args(kind) if member is not type(None))
        return next((value for value in converted if not isinstance(value, str)), text)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is int or kind is float:
        try:
            return kind(text)
        except ValueError:
            return text
    if get_origin(kind) is tuple:
        if text.startswith("["):
            try:
                return from_toml(tomllib.loads(f"x = {text}")["x"], kind)
            except tomllib.TOMLDecodeError:
                return text
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        members = _members(kind, len(parts))
        return tuple(from_text(part, member) for part, member in zip(parts, members, strict=True))
    return text


def from_toml(value: Any, kind: Any) -> Any:
    """The value that a parsed TOML value means: "none" where None is allowed, 1 for 1.0, arrays as tuples."""
    if _is_union(kind):
        if type(None) in get_args(kind) and value == "none":
            return None
        for member in get_args(kind):
            value = from_toml(value, member)
        return value
    if kind is float and type(value) is int:
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        members = _members(kind, len(value))
        return tuple(from_toml(part, member) for part, member in zip(value, members, strict=True))
    return value


def mismatch(value: Any, kind: Any) -> str | None:
    """None if `value` is of this kind, else what is expected: "an integer", "one of a, b", ..."""
    if _is_union(kind):
        reasons = [mismatch(value, member) for member in get_args(kind)]
        return None if None in reasons else " or ".join(reasons)
    if kind is type(None):
        return None if value is None else '"none"'
    if get_origin(kind) is Literal:
        names = get_args(kind)
        one = ", ".join(f'"{name}"' for name in names)
        return None if value in names else (f"one of {one}" if len(names) > 1 else one)
    if get_origin(kind) is tuple:
        fixed = None if get_args(kind)[-1] is ... else len(get_args(kind))
        if isinstance(value, tuple) and fixed in (None, len(value)):
            members = _members(kind, len(value))
            if all(mismatch(part, member) is None for part, member in zip(value, members, strict=True)):
                return None
        count = "a list of" if get_args(kind)[-1] is ... else f"{len(get_args(kind))}"
        return f"{count} {'texts' if get_args(kind)[0] is str else 'numbers'}"
    expected = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]
    return None if type(value) is kind or (kind is float and type(value) is int) else expected


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _members(kind: Any, count: int) -> list[Any]:
    """Annotation of each of `count` elements; elements beyond a fixed length are read like the last."""
    arguments = [argument for argument in get_args(kind) if argument is not ...]
    return [arguments[min(index, len(arguments) - 1)] for index in range(count)]
