"""bfloat16 by integer arithmetic on bit patterns, in numpy: what casts and roundings are held to."""

from __future__ import annotations

import numpy as np
import torch

PATTERNS = np.arange(2**16, dtype=np.uint16)
# Below, at and above each tie, and both ends of the interval that belongs to a pattern.
LOWER = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
EVERY = ((PATTERNS.astype(np.uint32)[:, None] << 16) | LOWER).reshape(-1)


def widened(halves):
    """bfloat16 bits uint16 -> float32 bits uint32."""
    return halves.astype(np.uint32) << 16


def narrowed(bits):
    """float32 bits uint32 -> bfloat16 bits uint16, NaN left to the caller."""
    upper, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (upper % 2 == 1))
    return (upper + up).astype(np.uint16)


def is_nan16(halves):
    return (halves & 0x7FFF) > 0x7F80


def is_nan32(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


def float32_of(bits):
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def bfloat16_of(halves):
    return torch.from_numpy(halves.view(np.int16).copy()).view(torch.bfloat16)


def bits_of(x):
    """uint16 or uint32 bits of a bfloat16 or float32 tensor, flat."""
    kind, plain = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}[x.dtype]
    return x.detach().contiguous().view(kind).numpy().view(plain).reshape(-1)
