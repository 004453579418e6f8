"""Rounding profiles: which intermediate is rounded to the model dtype, and where.

The one place that says so; sampler, replay and dense forward all call it. In float32
and float64 the two profiles are the same function up to the order of operations.

| region | `hf` (the official eager code) | `fused` |
|---|---|---|
| RMS norm | float32 inside; rounded after x * rsqrt and after the weight | rounded once, after a following add |
| residual add | rounded | part of the norm region |
| rotary embedding | cos, sin, both products and their sum rounded | float32 inside, rounded once |
| SwiGLU | silu rounded, product rounded | float32 inside, rounded once |
| attention scores | `eager`: product, scale, mask and probabilities each rounded | `sdpa`: float32 inside the kernel |
| linear layers | float32 accumulation, output rounded | the same |
| head, log-softmax, gate, exit distribution | float32 throughout | the same |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.numerics import wide

PROFILES = ("hf", "fused")


def check_profile(name: str) -> str:
    """Return `name` if it is a profile, else ValueError."""
    if name not in PROFILES:
        raise ValueError(f"profile = {name!r} is unknown; use one of {', '.join(PROFILES)}")
    return name


def attention_kernel(profile: str, dtype: torch.dtype) -> str:
    """The attention kernel that a profile means in a dtype: `eager` or `sdpa`.

    Without roundings inside (float32, float64) the eager form has nothing to reproduce, so
    the library kernel is used.
    """
    return "eager" if profile == "hf" and dtype == torch.bfloat16 else "sdpa"


def rms_norm(x: Tensor, weight: Tensor, eps: float, profile: str) -> Tensor:
    """RMS norm of x [R, H] with weight [H], in x's dtype."""
    if profile == "hf":
        return weight * _unit_rms(x, eps).to(x.dtype)
    return (_unit_rms(x, eps) * weight.to(wide(x.dtype))).to(x.dtype)


def add_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, profile: str) -> Tensor:
    """residual + rms_norm(x), all [R, H]: the sandwich norm and its residual add."""
    if profile == "hf":
        return residual + rms_norm(x, weight, eps, profile)
    kind = wide(x.dtype)
    return (residual.to(kind) + _unit_rms(x, eps) * weight.to(kind)).to(x.dtype)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.to(wide(x.dtype)), x.shape[-1:], None, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, profile: str) -> Tensor:
    """Rotary embedding of x [R, heads, D] by cos and signed sin [R, 1, D] (`models/rotary.py`), float32 or wider."""
    if profile == "hf":
        return x * cos.to(x.dtype) + _swap_halves(x) * sin.to(x.dtype)
    wide_x = x.to(wide(x.dtype))
    return (wide_x * cos + _swap_halves(wide_x) * sin).to(x.dtype)


def _swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def swiglu(gate: Tensor, up: Tensor, profile: str) -> Tensor:
    """silu(gate) * up, [R, I]."""
    if profile == "hf":
        return F.silu(gate) * up
    kind = wide(gate.dtype)
    return (F.silu(gate.to(kind)) * up.to(kind)).to(gate.dtype)
