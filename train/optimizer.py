"""AdamW on one flat float32 master vector, and the learning rate as a function of the step.

Knows names, shapes and a gradient vector; neither the model nor how the gradient was made.
Every operation on the vector is elementwise except the norm (see `reduction`), so a process that
owns a slice computes the bits that one process computes for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import TrainConfig
from train.reduction import squared_norm

# Tensors start at multiples of 16 float32 elements (64 bytes): kernels choose other instructions,
# hence other bits, for operands off a 16-byte boundary, also in a bfloat16 copy of the vector.
ALIGNMENT = 16


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in the flat vector: decayed ones first, each group in the given order.

    Gaps of at most ALIGNMENT - 1 elements lie between tensors; they hold zeros and stay zero.
    """

    names: tuple[str, ...]  # in the order of the vector
    shapes: tuple[tuple[int, ...], ...]  # of each name
    offsets: tuple[int, ...]  # first element of each name, a multiple of ALIGNMENT
    decayed: int  # elements before this one belong to tensors with weight decay
    size: int  # elements of the vector

    @classmethod
    def build(cls, shapes: Mapping[str, tuple[int, ...]], undecayed: Collection[str]) -> FlatLayout:
        """shapes: name -> shape in order; undecayed: names without weight decay (norms, biases)."""
        unknown = sorted(set(undecayed) - set(shapes))
        assert not unknown, f"undecayed names without a shape: {unknown}"
        names = [name for name in shapes if name not in undecayed]
        boundary = len(names)
        names += [name for name in shapes if name in undecayed]
        offsets = [0]
        for name in names:
            offsets.append(offsets[-1] + -(-math.prod(shapes[name]) // ALIGNMENT) * ALIGNMENT)
        return cls(
            names=tuple(names),
            shapes=tuple(tuple(shapes[name]) for name in names),
            offsets=tuple(offsets[:-1]),
            decayed=offsets[boundary],
            size=offsets[-1],
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """name -> view of its shape into `flat` [size], any dtype."""
        assert flat.shape == (self.size,), f"flat vector {tuple(flat.shape)}, layout of {self.size} elements"
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor], device: str | torch.device = "cpu") -> Tensor:
        """A new float32 vector [size] with the tensors' values, zeros in the gaps."""
        assert set(tensors) == set(self.names), f"tensors differ from the layout: {set(tensors) ^ set(self.names)}"
        flat = torch.zeros(self.size, dtype=torch.float32, device=device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat


@dataclass(frozen=True)
class StepReport:
    """What one update did."""

    gradient_norm: float  # before clipping, float64
    scale: float  # the gradient was multiplied by this float32 number; 1.0: not clipped
    moments_updated: bool  # False when the gradient was exactly zero: only the decay was applied


class FlatAdamW:
    """torch.optim.AdamW (the plain loop, neither foreach nor fused) over the two halves of a master vector.

    master: float32 [size], updated in place. Its first `decayed` elements get weight decay.
    The plain loop is the variant whose bits are the same for any cut of the vector; fused kernels
    round differently.
    """

    def __init__(
        self,
        master: Tensor,
        decayed: int,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
    ):
        assert master.dtype == torch.float32 and master.dim() == 1 and not master.requires_grad
        self.master = master
        self.decayed = decayed
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm  # inf: never clip
        self.updates = 0  # calls of `step`; version n of the weights is the master after n of them
        self.exp_avg = torch.zeros_like(master)
        self.exp_avg_sq = torch.zeros_like(master)
        self.moment_steps = torch.zeros((), dtype=torch.float32)  # updates that moved the moments
        halves = [slice(0, decayed), slice(decayed, None)]
        self._parts = [part for part in halves if master[part].numel()]
        self._parameters = [torch.nn.Parameter(master[part]) for part in self._parts]
        groups = [
            {"params": [parameter], "weight_decay": weight_decay if part.start == 0 and decayed else 0.0}
            for part, parameter in zip(self._parts, self._parameters, strict=True)
        ]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, foreach=False, fused=False)
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            # Views of two flat vectors, and one step counter: a checkpoint holds three tensors.
            self._adam.state[parameter] = {
                "step": self.moment_steps.clone(),
                "exp_avg": self.exp_avg[part],
                "exp_avg_sq": self.exp_avg_sq[part],
            }

    def step(self, gradient: Tensor, lr: float) -> StepReport:
        """One update with `gradient` float32 [size], which is scaled in place when it is clipped.

        A gradient that is zero everywhere (every advantage was 0) moves no moment and no bias
        correction: weights change by the declared decay alone, p *= 1 - lr * weight_decay.

        RuntimeError: the norm is not finite.
        """
        assert gradient.shape == self.master.shape and gradient.dtype == torch.float32
        norm = math.sqrt(squared_norm(gradient))
        if not math.isfinite(norm):
            raise RuntimeError(
                f"gradient norm is {norm} at update {self.updates + 1}: the weights are as after update {self.updates}"
            )
        self.updates += 1
        if norm == 0.0:
            self.master[: self.decayed].mul_(1 - lr * self.weight_decay)
            return StepReport(0.0, 1.0, False)
        scale = 1.0
        if norm > self.clip_norm:
            # Divided in float64 and rounded to float32 once, so that every slice is scaled by the same number.
            scale = torch.tensor(self.clip_norm / norm, dtype=torch.float32).item()
            gradient.mul_(scale)
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            parameter.grad = gradient[part]
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.moment_steps += 1
        for parameter in self._parameters:
            parameter.grad = None
        return StepReport(norm, scale, True)

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint needs besides the master; not copies."""
        return {
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "moment_steps": self.moment_steps,
            "updates": torch.tensor(self.updates, dtype=torch.int64),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned. RuntimeError: another set of tensors, shape or dtype."""
        own = self.state()
        if set(state) != set(own):
            raise RuntimeError(f"optimizer state holds {sorted(state)}, expected {sorted(own)}")
        for name, tensor in state.items():
            if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                raise RuntimeError(
                    f"optimizer state {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"expected {tuple(own[name].shape)} {own[name].dtype}"
                )
        for name in ("exp_avg", "exp_avg_sq", "moment_steps"):
            own[name].copy_(state[name])
        self.updates = int(state["updates"])
        for parameter in self._parameters:
            self._adam.state[parameter]["step"].copy_(self.moment_steps)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of training step `step` (1, 2, ...; all updates of a step share it).

    Warm-up: step / warmup_steps of the full rate, so that the last warm-up step has all of it. Then
    constant, or linear or cosine from 1 towards min_ratio over `schedule_steps` (0: run.steps). The
    first step after warm-up still has the full rate and the last one lies just above min_ratio.
    """
    assert step >= 1, f"steps count from 1, not {step}"
    learner = config.learner
    if step <= learner.warmup_steps:
        return learner.learning_rate * step / learner.warmup_steps
    if learner.schedule == "constant":
        return learner.learning_rate
    horizon = learner.schedule_steps or config.run.steps
    progress = min(1.0, (step - 1 - learner.warmup_steps) / max(1, horizon - learner.warmup_steps))
    remaining = 1 - progress if learner.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return learner.learning_rate * (learner.min_ratio + (1 - learner.min_ratio) * remaining)
