"""Numerics `invariant`: find, or check, the shape rule under which rows keep their bits.

Every operator of a pass is tried with this model's shapes, dtype and kernels: the bits that a
row gets in a full block must come out again for every smaller count of rows, at every place in
the call, beside any other rows (`models/trials.py`).

Nothing about a CPU is written down here: a rule is what was found on the machine. Where none is
found, `invariant` is refused and `shapes` carries every promise.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from models.files import replacing
from models.looped import LoopedLM
from models.numerics import dtype_name, fingerprint
from models.rule import Rule, key_lengths
from models.trials import (
    BLOCKS,
    HEAD_BLOCKS,
    QUERY_BLOCKS,
    Trial,
    attention_trials,
    free_trials,
    head_trials,
    stack_trials,
)

VERSION = 1  # of the trials and the search, for stored results

MODES = ("shapes", "invariant", "auto")
MULTIPLES = (1, 2, 4, 8, 16)
SMALL_COUNTS = 16  # multiples of the row count that are all tried: where kernels change

def set_numerics(model: LoopedLM, mode: str, *, length: int) -> str:
    """Put a model under numerics `mode` for sequences of up to `length` tokens; one line that says so.

    mode: `shapes`, `invariant` or `auto` (invariant where a rule is found, else shapes). Errors:
    ValueError for an unknown mode, and for invariant where no rule holds, naming operator and shape.
    """
    if mode not in MODES:
        raise ValueError(f"numerics = {mode!r} is unknown; use one of {', '.join(MODES)}")
    model.rule = None
    if mode == "shapes":
        return f"numerics shapes, linear {model.linear}"
    length = key_lengths(min(length, model.config.max_positions))[-1]
    found = _remembered(model, ["find", length], lambda: find_rule(model, length))
    if isinstance(found, dict):
        model.rule = Rule(**found)
        counts = ", ".join(f"{name} {value}" for name, value in found.items())
        return f"numerics invariant, linear {model.linear} ({counts})"
    if mode == "invariant":
        raise ValueError(f"numerics = 'invariant' does not hold on this machine: {found}; use shapes")
    return f"numerics shapes, linear {model.linear}, since invariant does not hold on this machine: {found}"


def adopt_rule(model: LoopedLM, rule: Mapping[str, int]) -> None:
    """Put a model under the rule of a log (none: numerics `shapes`), after trying it on this machine.

    Errors: RuntimeError naming the operator that breaks it here.
    """
    model.rule = None
    if not rule:
        return
    wanted = Rule(**rule)
    reason = _remembered(model, ["broken", rule], lambda: broken(model, wanted))
    if reason is not None:
        raise RuntimeError(f"numerics invariant does not hold on this machine under the rule of the log: {reason}")
    model.rule = wanted


def _remembered(model: LoopedLM, question: list, answer: Callable[[], Rule | str | None]):
    """The answer from an earlier start on this machine with these libraries and shapes, or a fresh one.

    A rule is returned as a plain object. What cannot be read or written is found anew each time.
    """
    shapes = sorted({shape for shape in model.config.weight_shapes().values()})
    key = [VERSION, platform.node(), question, fingerprint(model.device), dtype_name(model.dtype), model.profile,
           model.kernel, model.linear, shapes, model.config.heads, model.config.kv_heads, model.config.head_dim]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reprise"
    file = folder / f"rule-{name}.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["key"] == json.loads(json.dumps(key)):
            return stored["answer"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = answer()
    found = dict(vars(found)) if isinstance(found, Rule) else found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps({"key": key, "answer": found}), encoding="utf-8")
    except OSError:
        pass
    return found


def find_rule(model: LoopedLM, length: int) -> Rule | str:
    """The cheapest rule that holds for `model` up to `length` tokens, or why there is none."""
    counts: list[int] = []
    for trials, blocks in ((stack_trials(model), BLOCKS), (head_trials(model), HEAD_BLOCKS),
                           (attention_trials(model, length), QUERY_BLOCKS)):
        multiple, block = 1, blocks[0]
        for trial in trials:
            found = _search(trial, multiple, [b for b in blocks if b <= block])
            if found is None:
                return f"{trial.name}: rows differ by their company even in blocks of {blocks[-1]} rows"
            multiple, block = found
        counts += [multiple, block]
    rule = Rule(*counts, length=length)
    return _broken(free_trials(model), 1, HEAD_BLOCKS[0]) or rule


def broken(model: LoopedLM, rule: Rule) -> str | None:
    """Which operator does not keep `rule` here, None where all do."""
    return (_broken(stack_trials(model), rule.rows, rule.row_block)
            or _broken(head_trials(model), rule.head_rows, rule.head_block)
            or _broken(attention_trials(model, rule.length), rule.queries, rule.query_block)
            or _broken(free_trials(model), 1, HEAD_BLOCKS[0]))


def _broken(trials: Iterable[Trial], multiple: int, block: int) -> str | None:
    for trial in trials:
        if not _holds(trial, multiple, block):
            return f"{trial.name}: rows differ by their company in blocks of {block} rows, padded to {multiple}"
    return None


def _search(trial: Trial, least: int, blocks: list[int]) -> tuple[int, int] | None:
    """(multiple, block) with the largest block that needs a small multiple, `least` at least.

    A pass of few rows pays for the multiple, a dense forward for the block: blocks are tried
    from the largest down, each with multiples up to a quarter of it; then fixed counts.
    """
    for block in blocks:
        for multiple in MULTIPLES:
            if least <= multiple <= block // 4 and _holds(trial, multiple, block):
                return multiple, block
    for block in reversed(blocks):
        if block >= least and _holds(trial, block, block):
            return block, block
    return None


def _holds(trial: Trial, multiple: int, block: int) -> bool:
    """Whether rows have the bits of a full block at every place, beside other rows, and in smaller calls."""
    rows = trial.rows[:block]
    wanted = trial.run(rows)
    backwards = torch.arange(block - 1, -1, -1, device=rows.device)
    if not torch.equal(trial.run(rows[backwards].contiguous()), wanted[backwards]):
        return False
    mixed = rows.clone()
    mixed[1::2] = rows[:1]
    if not torch.equal(trial.run(mixed)[::2], wanted[::2]):
        return False
    for count in _counts(multiple, block):
        first = (block - count) // 2  # the same rows elsewhere in the call, among other neighbours
        for run in (trial.run, *trial.variants):
            if not torch.equal(run(rows[first:first + count].clone()), wanted[first:first + count]):
                return False
    return True


def _counts(multiple: int, block: int) -> list[int]:
    """Row counts to try: the smallest multiples and some up to the block, rising."""
    small = range(multiple, min(SMALL_COUNTS * multiple, block) + 1, multiple)
    wide_steps = (block // 16, block // 8, block // 4, block // 2, 3 * block // 4, block - multiple, block)
    return sorted({*small, *(count // multiple * multiple for count in wide_steps if count >= multiple)})
