"""The learner's log-probability: the value of the replay, the gradient of the dense forward."""

from __future__ import annotations

import torch
from torch import Tensor


class Hybrid(torch.autograd.Function):
    """forward(dense, replay) -> replay's bits; backward hands the gradient to dense unchanged.

    dense [N]: log-probs with a graph. replay [N]: log-probs of the replayed passes, no graph, same
    dtype. Writing `dense + (replay - dense).detach()` instead does not return the bits of replay:
    the sum is rounded, so that ratios would differ from 1 at up to a third of the tokens.
    """

    @staticmethod
    def forward(ctx, dense: Tensor, replay: Tensor) -> Tensor:
        assert dense.shape == replay.shape and dense.dtype == replay.dtype, (
            f"dense {tuple(dense.shape)} {dense.dtype} and replay {tuple(replay.shape)} {replay.dtype} must agree"
        )
        return replay.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def hybrid(dense: Tensor, replay: Tensor) -> Tensor:
    """The log-probs [N] to train on; see `Hybrid`."""
    return Hybrid.apply(dense, replay.detach())
