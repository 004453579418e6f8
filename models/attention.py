"""Softmax attention over padded groups: the two kernels behind every attention of the project.

Rounding of the `eager` kernel follows the official code (`models/rounding.py`).
Masks are boolean with True = attend, the convention of torch's own kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.numerics import wide


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    """Attention of q [G, A, Q, D] over k, v [G, K, S, D] -> [G, A, Q, D].

    mask: bool [G, 1, Q, S], True = attend, at least one True in each row; None means causal
    with Q = S. Masked keys must be finite: their weight is exactly 0, and 0 * NaN is NaN.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise AssertionError(f"attention mask must be bool (True = attend), got {mask.dtype}")
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
        mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # One memory layout, whatever the caller's: kernels choose by strides, and so would bits.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    lowest = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(
        ~mask, torch.finfo(q.dtype).min)
    weights = torch.softmax(scores + lowest, -1, dtype=wide(q.dtype)).to(q.dtype)
    return weights @ v
