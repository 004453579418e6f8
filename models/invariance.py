"""Numerics `invariant`: find, or check, the shape rule under which rows keep their bits.

Every operator of a pass is tried with this model's shapes, dtype and kernels: the bits that a
row gets in a full block must come out again for every smaller count of rows, at every place in
the call, beside any other rows. Data are made to show it: sums that cancel leave nothing but
their rounding errors, so that a bfloat16 result cannot hide in what order a kernel added.

Nothing about a CPU is written down here: a rule is what was found on the machine. Where none is
found, `invariant` is refused and `shapes` carries every promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import attention
from models.linear import linear, pack
from models.looped import LoopedLM
from models.numerics import dtype_name, wide
from models.rounding import add_norm, rms_norm, rotate, swiglu
from models.rule import Rule, key_lengths

VERSION = 1  # of this file's tests, for stored results

MODES = ("shapes", "invariant", "auto")
BLOCKS = (1024, 256, 64, 32, 16)  # most rows of one product of the stack, best first
HEAD_BLOCKS = (256, 64, 32, 16)
QUERY_BLOCKS = (64, 32, 16)
MULTIPLES = (1, 2, 4, 8, 16)
SMALL_COUNTS = 16  # multiples of the row count that are all tried: where kernels change

Operator = Callable[[Tensor], Tensor]
"""Rows [R, ...] -> rows [R, ...]: row r of the result is a function of row r alone."""


@dataclass(frozen=True)
class Trial:
    """One operator and the rows that it is tried on.

    Attributes:
        name: for messages: operator, shape and dtype.
        rows: input, as many rows as the largest block.
        run: the operator. variants: other surroundings in which rows must get the same bits.
    """

    name: str
    rows: Tensor
    run: Operator
    variants: tuple[Operator, ...] = ()


def set_numerics(model: LoopedLM, mode: str, *, length: int) -> str:
    """Put a model under numerics `mode` for sequences of up to `length` tokens; what became of it.

    mode: `shapes`, `invariant` or `auto` (invariant where a rule is found, else shapes). Errors:
    ValueError for an unknown mode, and for invariant where no rule holds, naming operator and shape.
    """
    if mode not in MODES:
        raise ValueError(f"numerics = {mode!r} is unknown; use one of {', '.join(MODES)}")
    model.rule = None
    if mode == "shapes":
        return "numerics shapes"
    found = find_rule(model, length)
    if isinstance(found, Rule):
        model.rule = found
        return "numerics invariant: " + ", ".join(f"{name} {value}" for name, value in vars(found).items())
    if mode == "invariant":
        raise ValueError(f"numerics = 'invariant' does not hold on this machine: {found}; use shapes")
    return f"numerics shapes, since invariant does not hold on this machine: {found}"


def find_rule(model: LoopedLM, length: int) -> Rule | str:
    """The cheapest rule that holds for `model` up to `length` tokens, or why there is none."""
    counts: list[int] = []
    for trials, blocks in ((_stack_trials(model), BLOCKS), (_head_trials(model), HEAD_BLOCKS),
                           (_attention_trials(model, length), QUERY_BLOCKS)):
        multiple, block = 1, blocks[0]
        for trial in trials:
            found = _search(trial, multiple, [b for b in blocks if b <= block])
            if found is None:
                return f"{trial.name}: rows differ by their company even in blocks of {blocks[-1]} rows"
            multiple, block = found
        counts += [multiple, block]
    return Rule(*counts)


def broken(model: LoopedLM, rule: Rule, length: int) -> str | None:
    """Which operator does not keep `rule` here, None where all do."""
    for trials, multiple, block in ((_stack_trials(model), rule.rows, rule.row_block),
                                    (_head_trials(model), rule.head_rows, rule.head_block),
                                    (_attention_trials(model, length), rule.queries, rule.query_block)):
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
    """Whether rows have the bits of the full block in every smaller call and at every place."""
    rows = trial.rows[:block]
    wanted = trial.run(rows)
    backwards = torch.arange(block - 1, -1, -1, device=rows.device)
    if not torch.equal(trial.run(rows[backwards].contiguous()), wanted[backwards]):
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


def _random(model: LoopedLM, seed: int, *shape: int, scale: float = 1.0, kind: torch.dtype | None = None) -> Tensor:
    value = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return value.to(kind or model.dtype).to(model.device)


def _cancelling(model: LoopedLM, rows: int, columns: int, width: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, width], weight [columns, width] whose products are sums that cancel to rounding errors."""
    x, w = (_random(model, width + n, n, width // 2, kind=kind) for n in (rows, columns))
    order = torch.randperm(width // 2 * 2, generator=torch.Generator().manual_seed(width)).to(model.device)
    x, w = torch.cat((x, x), 1)[:, order], torch.cat((w, -w), 1)[:, order]
    if width % 2:
        x, w = (torch.nn.functional.pad(part, (0, 1)) for part in (x, w))
    return x.contiguous(), w.contiguous()


def _product_trial(model: LoopedLM, name: str, columns: int, width: int, kind: torch.dtype) -> Trial:
    x, weight = _cancelling(model, BLOCKS[0], columns, width, kind)
    packed = pack(weight) if model.linear == "packed" else None

    def run(rows: Tensor) -> Tensor:
        return linear(rows, weight, packed)

    def with_graph(rows: Tensor) -> Tensor:
        with torch.enable_grad():
            return linear(rows.requires_grad_(), weight, packed).detach()

    return Trial(f"linear {name} [{columns}, {width}] {model.linear} {dtype_name(kind)}", x, run, (with_graph,))


def _stack_trials(model: LoopedLM) -> Iterator[Trial]:
    """Everything of a pass that takes rows, attention apart."""
    config, profile, eps, count = model.config, model.profile, model.config.rms_eps, BLOCKS[0]
    shapes = {shape: name for name, shape in reversed(config.weight_shapes().items())
              if name.startswith("core.") and len(shape) == 2}
    for shape, name in shapes.items():
        yield _product_trial(model, name.split(".")[-1], *shape, model.dtype)
    hidden, inner = config.hidden, config.intermediate
    kind = f"{profile} {dtype_name(model.dtype)}"
    weight = _random(model, 1, hidden)
    first, second = _random(model, 2, count, hidden, scale=2.0), _random(model, 3, count, inner, scale=2.0)
    yield Trial(f"rms_norm [R, {hidden}] {kind}", first, lambda x: rms_norm(x, weight, eps, profile))
    yield Trial(f"add_norm [R, {hidden}] {kind}", first, lambda x: add_norm(x, x * 0.7, weight, eps, profile))
    yield Trial(f"swiglu [R, {inner}] {kind}", second, lambda x: swiglu(x, x * 0.7, profile))
    cos, sin = model.rotary(torch.full((count,), 63, device=model.device), 63)
    yield Trial(f"rotary [R, {config.heads}, {config.head_dim}] {kind}",
                _random(model, 4, count, config.heads, config.head_dim),
                lambda x: rotate(x, cos[:len(x)], sin[:len(x)], profile))


def _head_trials(model: LoopedLM) -> Iterator[Trial]:
    """Head, log-softmax and gate: float32 rows."""
    config, kind, count = model.config, wide(model.dtype), HEAD_BLOCKS[0]
    yield _product_trial(model, "head", config.vocab, config.hidden, kind)
    yield Trial(f"log_softmax [N, {config.vocab}] {dtype_name(kind)}",
                _random(model, 5, count, config.vocab, scale=4.0, kind=kind), lambda x: torch.log_softmax(x / 0.7, -1))
    yield Trial(f"exit gate [N, {config.hidden}] {dtype_name(kind)}", _random(model, 6, count, config.hidden),
                lambda x: model.gate(x)[:, None])


def _attention_trials(model: LoopedLM, length: int) -> Iterator[Trial]:
    """Attention at every key length that sequences of `length` tokens meet."""
    config, block = model.config, QUERY_BLOCKS[0]
    half = _random(model, 7, block, config.heads, config.head_dim // 2, scale=8.0)
    q = torch.cat((half, half), -1)
    for keys in key_lengths(min(length, config.max_positions)):
        # Scores are what is left of large sums. Each key stands twice, half a plane apart, with values
        # that cancel: the result is the rounding error of the sum over keys.
        first, rest = (_random(model, 8 + i, keys // 2, config.kv_heads, config.head_dim // 2) for i in (0, 1))
        k = torch.cat((first, 0.25 * rest - first), -1).repeat(2, 1, 1)
        v = _random(model, 10, keys // 2, config.kv_heads, config.head_dim)
        v = torch.cat((v, -v))
        visible = keys // 2 - torch.arange(block, device=model.device) % (keys // 4)
        mask = (torch.arange(keys // 2, device=model.device) < visible[:, None]).repeat(1, 2)
        runs = _attention_runs(model, q, k, v, mask)
        yield Trial(f"attention {model.kernel} over {keys} keys [{config.heads}, {config.head_dim}] "
                    f"{dtype_name(model.dtype)}", torch.arange(block, device=model.device), runs[0], runs[1:])


def _attention_runs(model: LoopedLM, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Operator, ...]:
    """Attention of queries q[rows] with mask [Q, S]: alone over keys that are read in place, in the
    middle of a batch of copies, and with a graph."""
    spread = [torch.cat((torch.ones_like(x), x, torch.ones_like(x))) for x in (k, v)]
    planes = [x[len(k):2 * len(k)].transpose(0, 1)[None] for x in spread]
    copies = [torch.stack((x.flip(0), x, 2 * x)).transpose(1, 2) for x in (k, v)]

    def inputs(rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        return (q[rows].transpose(0, 1).expand(batch, -1, -1, -1).contiguous(),
                mask[rows].expand(batch, 1, -1, -1).contiguous())

    def alone(rows: Tensor) -> Tensor:
        queries, seen = inputs(rows, 1)
        return attention(queries, *planes, seen, model.kernel)[0].transpose(0, 1)

    def in_batch(rows: Tensor) -> Tensor:
        queries, seen = inputs(rows, 3)
        return attention(queries, *copies, seen, model.kernel)[1].transpose(0, 1)

    def with_graph(rows: Tensor) -> Tensor:
        queries, seen = inputs(rows, 1)
        with torch.enable_grad():
            found = attention(queries.requires_grad_(), *(x[1:2].clone().requires_grad_() for x in copies), seen,
                              model.kernel)
        return found.detach()[0].transpose(0, 1)

    return alone, in_batch, with_graph
