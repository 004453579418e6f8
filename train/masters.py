"""Float32 master weights and the graph from them to the compute copy.

The gradient of a weight that is used T times is summed over loops and micro-batches in
float32, in the flat gradient vector: each use passes through `_Use`, which hands its
gradient on in float32. Summing the T contributions in bfloat16 would double the error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.looped import LoopedLM
from train.optimizer import FlatLayout

FROZEN = ("exit_gate.weight", "exit_gate.bias")  # no objective for the gate is built in


class _Use(torch.autograd.Function):
    """forward(leaf, compute) -> compute's values; the gradient goes to the float32 leaf."""

    @staticmethod
    def forward(ctx, leaf: Tensor, compute: Tensor) -> Tensor:
        return compute.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(torch.float32), None


class Masters:
    """One flat float32 vector of the trained weights.

    Attributes:
        layout: where each tensor lies. flat: float32 [size], updated by the optimizer.
        frozen: float32 tensors outside the optimizer (the exit gate).
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        """weights: canonical name -> tensor; values are copied to float32."""
        trained = {name: tuple(w.shape) for name, w in weights.items() if name not in FROZEN}
        undecayed = {name for name, shape in trained.items() if len(shape) == 1}
        self.layout = FlatLayout.build(trained, undecayed)
        device = next(iter(weights.values())).device
        self.flat = self.layout.flatten({name: weights[name] for name in trained}, device)
        self.frozen = {name: weights[name].detach().to(torch.float32).clone()
                       for name in FROZEN if name in weights}
        self._leaves = {name: view.detach().requires_grad_()
                        for name, view in self.layout.views(self.flat).items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every weight in float32: views of `flat`, and the frozen ones."""
        return {**self.layout.views(self.flat), **self.frozen}

    def collect_into(self, gradient: Tensor | None) -> None:
        """Let backward passes add into `gradient`, float32 [size], from now on; None lets go of the last."""
        views = {} if gradient is None else self.layout.views(gradient)
        for name, leaf in self._leaves.items():
            leaf.grad = views.get(name)

    def differentiable(self, model: LoopedLM) -> dict[str, Tensor]:
        """The compute copy of `model` with a graph to the masters; call it once per loop.

        The head comes in float32, as it is used.
        """
        leaves = self._leaves
        weights = {name: _Use.apply(leaves[name], weight) if name in leaves else weight
                   for name, weight in model.weights.items()}
        head = "embed" if model.config.tied else "head"
        weights["head"] = _Use.apply(leaves[head], model.wide["head"])
        return weights
