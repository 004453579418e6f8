"""The exit distribution of a looped model: gate logits -> pdf, CDF, chosen loop. Pure.

lambda_t = sigmoid(gate_t); p_t = lambda_t * r_t with r_1 = 1, r_{t+1} = r_t (1 - lambda_t);
the last loop takes all remaining mass whatever its gate says (Ouro, LoopLM).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# A sigmoid is computed on whole multiples of this many elements: torch's kernel takes two vectors at
# a time (64 bfloat16 or 32 float32 elements of AVX-512) and computes what is left one by one, by another formula.
WHOLE = 64


def exit_probability(gate_logits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """sigmoid of gate logits of any shape, in `dtype`; an element's bits depend on neither its place nor the others."""
    flat = gate_logits.to(dtype).reshape(-1)
    whole = F.pad(flat, (0, -flat.numel() % WHOLE)).contiguous()
    return torch.sigmoid(whole)[:flat.numel()].view(gate_logits.shape)


def exit_distribution(gate_logits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gate logits [T, N] -> exit probabilities [N, T], every intermediate in `dtype`."""
    gate = exit_probability(gate_logits, dtype)
    remaining = torch.ones_like(gate[0])
    shares = []
    for t in range(gate.shape[0] - 1):
        shares.append(gate[t] * remaining)
        remaining = remaining * (1.0 - gate[t])
    return torch.stack([*shares, remaining], -1)


def exit_cdf(pdf: Tensor) -> Tensor:
    """Cumulative exit probability [N, T] in the dtype of `pdf` [N, T].

    The bits of torch's `cumsum` on a CPU: partial sums in the next wider dtype, each rounded. Spelt
    out, because a GPU adds in another order, and refuses to where deterministic kernels are asked for.
    """
    total = torch.zeros_like(pdf[:, 0], dtype=torch.float32 if pdf.dtype == torch.bfloat16 else torch.float64)
    sums = []
    for share in pdf.unbind(-1):
        total = total + share
        sums.append(total.to(pdf.dtype))
    return torch.stack(sums, -1)


def exit_loop(cdf: Tensor, threshold: float, rule: str = "never-early-at-one") -> Tensor:
    """First loop (1-based, int64 [N]) whose CDF reaches `threshold`, else the last.

    rule: `never-early-at-one` (the engine's): a threshold >= 1 always means the last loop.
    `official`: the comparison alone; in bfloat16 a CDF rounds up to exactly 1 as soon as the
    remaining mass is below 2^-9, so the official code leaves early at its shipped threshold
    of 1.0. Errors: ValueError for an unknown rule.
    """
    if rule not in ("never-early-at-one", "official"):
        raise ValueError(f"rule = {rule!r} is unknown; use never-early-at-one or official")
    count, loops = cdf.shape
    if rule == "never-early-at-one" and threshold >= 1:
        return torch.full((count,), loops, dtype=torch.int64, device=cdf.device)
    reached = cdf >= threshold
    first = reached.to(torch.int64).argmax(-1) + 1
    return torch.where(reached.any(-1), first, loops)
