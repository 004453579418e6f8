"""Rotary position tables, float32 whatever the model dtype.

A table lookup gives a position the same bits in every pass; computing angles per pass
would feed differently shaped batches to cos and sin. The sine is kept with the sign that the
rotation gives it: x cos + swap(x) sin, where swap exchanges the halves of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # positions a table grows by: a fixed shape, so growth never changes bits


def signed(sin: Tensor) -> Tensor:
    """A sine [..., D] with its first half negated."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


class Rotary:
    """cos and sin tables [positions, 1, D] for base theta.

    inv_freq [D/2] is computed in float32 and is never cast: in bfloat16 its relative error
    of 2^-9 is radians at position 1000.
    """

    def __init__(self, head_dim: int, theta: float, device: torch.device):
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        self.inv_freq = (1.0 / (theta ** exponent)).to(device)
        self.cos = torch.empty(0, 1, head_dim, dtype=torch.float32, device=device)
        self.sin = torch.empty_like(self.cos)

    def __call__(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [R, 1, D] float32 for int64 positions [R], none above `highest`."""
        while self.cos.shape[0] <= highest:
            self._grow()
        return self.cos[positions], self.sin[positions]

    def _grow(self) -> None:
        start = self.cos.shape[0]
        positions = torch.arange(start, start + BLOCK, device=self.inv_freq.device)
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        self.cos = torch.cat((self.cos, angles.cos()))
        self.sin = torch.cat((self.sin, signed(angles.sin())))
