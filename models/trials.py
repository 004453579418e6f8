"""What a pass does to rows, operator by operator, with data that show in what order a kernel adds.

Sums that cancel leave nothing but their rounding errors, so that a bfloat16 result cannot hide
the order. `models/invariance.py` runs the trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import attention
from models.exits import exit_probability
from models.linear import linear, pack
from models.looped import LoopedLM
from models.numerics import dtype_name, wide
from models.rounding import add_norm, rms_norm, rotate, swiglu
from models.rule import key_lengths

BLOCKS = (1024, 256, 64, 32, 16)  # most rows of one product of the stack, best first
HEAD_BLOCKS = (256, 64, 32, 16)
QUERY_BLOCKS = (64, 32, 16)

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


def stack_trials(model: LoopedLM) -> Iterator[Trial]:
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


def head_trials(model: LoopedLM) -> Iterator[Trial]:
    """The head, in float32."""
    yield _product_trial(model, "head", model.config.vocab, model.config.hidden, wide(model.dtype))


def free_trials(model: LoopedLM) -> Iterator[Trial]:
    """What takes read-out rows as they come, never padded: log-softmax, and the gate with its sigmoid."""
    config, kind, count = model.config, wide(model.dtype), HEAD_BLOCKS[0]
    yield Trial(f"log_softmax [N, {config.vocab}] {dtype_name(kind)}",
                _random(model, 5, count, config.vocab, scale=4.0, kind=kind), lambda x: torch.log_softmax(x / 0.7, -1))
    hidden = _random(model, 6, count, config.hidden)
    yield Trial(f"exit gate [N, {config.hidden}] {dtype_name(kind)}", hidden, lambda x: model.gate(x)[:, None])
    yield Trial("exit probability [N]", model.gate(hidden), exit_probability)


def attention_trials(model: LoopedLM, length: int) -> Iterator[Trial]:
    """Attention at every key length that sequences of `length` tokens meet."""
    config, block = model.config, QUERY_BLOCKS[0]
    half = _random(model, 7, block, config.heads, config.head_dim // 2, scale=8.0)
    q = torch.cat((half, half), -1)
    for keys in key_lengths(length):
        # Scores are what is left of large sums. Each key stands twice, at two random places, with values
        # that cancel: the result is the rounding error of the sum over keys.
        first, rest = (_random(model, 8 + i, keys // 2, config.kv_heads, config.head_dim // 2) for i in (0, 1))
        v = _random(model, 10, keys // 2, config.kv_heads, config.head_dim)
        visible = keys // 2 - torch.arange(block) % (keys // 4)
        mask = (torch.arange(keys // 2) < visible[:, None]).to(model.device)
        order = torch.randperm(keys, generator=torch.Generator().manual_seed(keys)).to(model.device)
        k, v = torch.cat((first, 0.25 * rest - first), -1).repeat(2, 1, 1)[order], torch.cat((v, -v))[order]
        mask = mask.repeat(1, 2)[:, order]
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
