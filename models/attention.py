"""Softmax attention over padded groups: the two kernels behind every attention of the project.

Rounding of the `eager` kernel follows the official code (`models/rounding.py`).
Masks are boolean with True = attend, the convention of torch's own kernel; `additive` turns one
into what the kernel adds, once for all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.numerics import wide


def additive(mask: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
    """A bool mask [..., Q, S] as what `kernel` adds to the scores: 0 where it attends."""
    hidden = torch.finfo(dtype).min if kernel == "eager" else float("-inf")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    """Attention of q [G, A, Q, D] over k, v [G, K, S, D] -> [G, A, Q, D].

    mask: [G, 1, Q, S], bool with True = attend or its `additive` form in q's dtype, at least one
    key in each row; None means causal with Q = S. Masked keys must be finite: their weight is
    exactly 0, and 0 * NaN is NaN.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = additive(mask, q.dtype, kernel)
    if mask is not None and mask.dtype != q.dtype:
        raise AssertionError(f"attention mask must be bool (True = attend) or additive in {q.dtype}, got {mask.dtype}")
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                              enable_gqa=q.shape[1] != k.shape[1])
    if kernel != "eager":
        raise AssertionError(f"unknown attention kernel {kernel!r}")
    return _eager(q, k, v, mask)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if mask is None:
        size = q.shape[2]
        mask = additive(torch.ones(size, size, dtype=torch.bool, device=q.device).tril(), q.dtype, "eager")
    # One memory layout, whatever the caller's: kernels choose by strides, and so would bits.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores + mask, -1, dtype=wide(q.dtype)).to(q.dtype)
    return weights @ v
