"""Schedules: the text that names one, and the exit depth it gives a position. No torch.

A schedule decides at which loop a token is read out; deeper cells stay pending until a
later position needs that loop (`lazy` catch-up).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from engine.philox import depth_word

GRAMMAR = ("dense, exit:D, exit:gate=Q[,min=A][,max=B], exit:periodic=D,C or "
           "exit:mix=D:WEIGHT,D:WEIGHT,... (optionally followed by +lazy)")


@dataclass(frozen=True)
class Schedule:
    """One schedule for a model of `loops` loops.

    Attributes:
        text: canonical text; equal texts are equal schedules.
        kind: `fixed`, `gate`, `periodic` or `mix`.
        loops: T of the model.
        shallow: depth of `fixed` and of the shallow positions of `periodic`.
        period: every period-th response position of `periodic` is read out at T.
        threshold, low, high: of `gate`: smallest loop whose cumulative exit probability
            reaches `threshold`, held within low..high; 1 never leaves early (more is read as 1).
        weights: of `mix`: (depth, integer weight) in ascending depth.
    """

    text: str
    kind: str
    loops: int
    shallow: int = 0
    period: int = 0
    threshold: float = 0.0
    low: int = 1
    high: int = 0
    weights: tuple[tuple[int, int], ...] = ()

    @property
    def max_depth(self) -> int:
        """The deepest loop that any position may need."""
        if self.kind == "fixed":
            return self.shallow
        if self.kind == "gate":
            return self.high
        if self.kind == "mix":
            return max(depth for depth, weight in self.weights if weight)
        return self.loops

    def depth(self, seed: int, uid: int, position: int, index: int) -> int | None:
        """Exit depth of a position; None where the gate decides while it runs.

        position: of the token read out, in the whole sequence; index: which response token
        its logits yield, from 0.
        """
        if self.kind == "gate":
            return None
        if self.kind == "periodic":
            return self.loops if (index + 1) % self.period == 0 else self.shallow
        if self.kind == "mix":
            total = sum(weight for _, weight in self.weights)
            pick = depth_word(seed, uid, position) * total >> 32
            for depth, weight in self.weights:
                pick -= weight
                if pick < 0:
                    return depth
        return self.shallow


def parse_schedule(text: str, loops: int) -> Schedule:
    """Read a schedule for a model of `loops` loops. ValueError says what is wrong."""
    body, plus, catch_up = text.strip().partition("+")
    if plus and catch_up != "lazy":
        raise ValueError(f"schedule = {text!r}: catch-up {catch_up!r} is not supported; use lazy "
                         "(the default)")
    name, _, argument = body.partition(":")
    if body == "dense":
        return Schedule("dense", "fixed", loops, shallow=loops)
    if name == "draft":
        raise ValueError(f"schedule = {text!r}: draft schedules are not supported yet; use dense "
                         "for the full-depth policy")
    if name != "exit" or not argument:
        raise ValueError(f"schedule = {text!r} is not a schedule; use {GRAMMAR}")
    if argument.isdecimal():
        depth = _depth(text, argument, loops)
        return Schedule(f"exit:{depth}", "fixed", loops, shallow=depth)
    kind, _, values = argument.partition("=")
    readers = {"gate": _gate, "periodic": _periodic, "mix": _mix}
    if kind not in readers:
        raise ValueError(f"schedule = {text!r} is not a schedule; use {GRAMMAR}")
    return readers[kind](text, values, loops)


def _depth(text: str, value: str, loops: int) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= loops:
        raise ValueError(f"schedule = {text!r}: depth {value!r} must be a loop from 1 to {loops}")
    return int(value)


def _gate(text: str, values: str, loops: int) -> Schedule:
    first, *rest = values.split(",")
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", first) or float(first) <= 0:
        raise ValueError(f"schedule = {text!r}: gate threshold {first!r} must be a number above 0, "
                         "as in exit:gate=0.4")
    threshold = min(float(first), 1.0)
    bounds: dict[str, int] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name not in ("min", "max") or name in bounds:
            raise ValueError(f"schedule = {text!r}: option {name!r} of gate must be min or max, each "
                             "at most once")
        bounds[name] = _depth(text, value, loops)
    low, high = bounds.get("min", 1), bounds.get("max", loops)
    if low > high:
        raise ValueError(f"schedule = {text!r}: min = {low} is above max = {high}")
    # Positional digits: an exponent would not be read back.
    canonical = f"exit:gate={Decimal(repr(threshold)):f},min={low},max={high}"
    return Schedule(canonical, "gate", loops, threshold=threshold, low=low, high=high)


def _periodic(text: str, values: str, loops: int) -> Schedule:
    parts = values.split(",")
    if len(parts) != 2 or not parts[1].isdecimal() or int(parts[1]) < 1:
        raise ValueError(f"schedule = {text!r}: periodic takes a depth and a period of at least 1, "
                         "as in exit:periodic=2,4")
    depth, period = _depth(text, parts[0], loops), int(parts[1])
    return Schedule(f"exit:periodic={depth},{period}", "periodic", loops, shallow=depth, period=period)


def _mix(text: str, values: str, loops: int) -> Schedule:
    weights: dict[int, int] = {}
    for part in values.split(","):
        depth_text, _, weight = part.partition(":")
        depth = _depth(text, depth_text, loops)
        if not weight.isdecimal() or depth in weights:
            raise ValueError(f"schedule = {text!r}: {part!r} must be DEPTH:WEIGHT with an integer "
                             "weight, each depth once")
        weights[depth] = int(weight)
    if not 0 < sum(weights.values()) <= 2**32:
        raise ValueError(f"schedule = {text!r}: the weights of mix must add up to 1..2^32, the range "
                         "of the numbers they are drawn with")
    ordered = tuple(sorted(weights.items()))
    canonical = ",".join(f"{depth}:{weight}" for depth, weight in ordered)
    return Schedule(f"exit:mix={canonical}", "mix", loops, weights=ordered)
