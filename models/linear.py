"""The linear operator: one kernel for sampler, replay and dense forward, with and without a graph.

`native` is torch's own `linear`. `packed` multiplies by weights that oneDNN has laid out once
a policy version, except that a single float32 row is left to the plain matrix-vector product,
which reads the weight a fifth faster. Their bits differ, so which of the two a model uses belongs
to its logs; within one, bits follow from the row count, like those of any kernel. Knows no model.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("native", "packed")

# Below this many elements the packed kernel's fixed cost (about 20 us a call) outweighs its gain.
PACKED_FROM = 2**18


def choose_linear(kind: str, dtype: torch.dtype, device: torch.device, elements: int) -> str:
    """`native` or `packed` for `kind`, which may also be `auto`.

    elements: of a query matrix of the stack. auto packs from `PACKED_FROM` elements on where the
    kernel exists; it reads no clock, so it always chooses alike.
    Errors: ValueError for an unknown kind, or for packed where the kernel does not exist.
    """
    if kind not in (*KINDS, "auto"):
        raise ValueError(f"linear = {kind!r} is unknown; use auto, {' or '.join(KINDS)}")
    if kind == "native" or (kind == "auto" and elements < PACKED_FROM):
        return "native"
    reason = packed_unavailable(dtype, torch.device(device).type)
    if reason is None:
        return "packed"
    if kind == "packed":
        raise ValueError(f"linear = 'packed' is not available: {reason}; use native")
    return "native"


@functools.cache
def packed_unavailable(dtype: torch.dtype, device: str) -> str | None:
    """Why there is no packed kernel for dtype and device here; None where there is one.

    The operators are private to torch, so they are tried: they must exist, run, and give the
    product to within rounding.
    """
    if device != "cpu":
        return f"weights are packed on cpu only, not on {device}"
    x = torch.arange(64, dtype=torch.float32).view(2, 32).to(dtype) / 64
    weight = torch.arange(512, dtype=torch.float32).view(16, 32).to(dtype) / 512
    try:
        found = _packed_product(x, pack(weight))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"this torch or CPU has no such kernel for {dtype} ({str(error).splitlines()[0]})"
    if found.dtype != dtype or not torch.allclose(found.double(), x.double() @ weight.double().T, rtol=2**-7):
        return f"this torch's kernel gives another product in {dtype}"
    return None


def pack(weight: Tensor) -> Tensor:
    """The packed form of a weight [N, K]: an opaque copy of its values as they are now."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """x [R, ...] with its last row repeated until R is a multiple of `multiple`."""
    more = -x.shape[0] % multiple
    return torch.cat((x, x[-1:].expand(more, *x.shape[1:]))) if more else x


def linear(x: Tensor, weight: Tensor, packed: Tensor | None = None, block: int | None = None) -> Tensor:
    """x [R, K] times weight [N, K] transposed -> [R, N].

    packed: `pack` of the same values, multiplied with in its stead; the gradient is taken on
    the plain weight. block: most rows of one product; more rows are cut into pieces.
    """
    if packed is None and (block is None or x.shape[0] <= block):
        return F.linear(x, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, packed, block)
    return _product(x, weight, packed, block)


class _Linear(torch.autograd.Function):
    """Forward by the kernel that the sampler uses; backward on the plain weight, in one piece."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, packed: Tensor | None, block: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, packed, block)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_weight = gradient.T @ x if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None, None


def _product(x: Tensor, weight: Tensor, packed: Tensor | None, block: int | None) -> Tensor:
    if block is None or x.shape[0] <= block:
        single = x.shape[0] == 1 and x.dtype == torch.float32
        return F.linear(x, weight) if packed is None or single else _packed_product(x, packed)
    return torch.cat([_product(piece, weight, packed, None) for piece in x.split(block)])


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, None, "none", [], "")
