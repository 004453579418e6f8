"""The looped model: three verbs over rows, built once, used by sampler, replay and dense.

Shape letters: R rows, N read-out rows, H hidden, A query heads, K kv heads, D head_dim,
I intermediate, V vocabulary, L layers.

A row is one position of one sequence at one loop. The loops share their weights, so rows
at different loops may stand in one call; only the `attend` callback knows which is which.
This file knows no cache, no schedule and no optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.numerics import dtype_name, wide
from models.rotary import Rotary
from models.rounding import add_norm, attention_kernel, check_profile, rms_norm, rotate, swiglu

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [R, A, D], k [R, K, D], v [R, K, D]) -> [R, A, D]; k is already rotated."""

WIDE_NAMES = ("exit_gate.weight", "exit_gate.bias", "head")


class LoopedLM:
    """Weights (the compute copy of one policy version) and the verbs over them.

    Attributes:
        config, profile, dtype, device: fixed at construction.
        weights: canonical name -> tensor, contiguous, owned storage (never a view of a
            mapped file: a weight 4 bytes off a 16-byte boundary gives other bits).
        version: policy version, the number of optimizer steps behind these weights.
        kernel: attention kernel, `eager` or `sdpa`.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, profile: str = "hf",
                 version: int = 0):
        shapes = config.weight_shapes()
        if set(weights) != set(shapes):
            raise AssertionError(f"weights do not match the config: {set(weights) ^ set(shapes)}")
        self.config = config
        self.profile = check_profile(profile)
        self.weights = {name: weights[name] for name in shapes}
        for name, weight in self.weights.items():
            if tuple(weight.shape) != shapes[name] or not weight.is_contiguous():
                raise AssertionError(f"{name}: shape {tuple(weight.shape)}, expected {shapes[name]}")
            if weight.data_ptr() % 16:
                raise AssertionError(f"{name} starts off a 16-byte boundary; give it own storage")
        self.dtype = self.weights["embed"].dtype
        self.device = self.weights["embed"].device
        self.version = version
        self.kernel = attention_kernel(profile, self.dtype)
        self.rotary = Rotary(config.head_dim, config.rope_theta, self.device)
        self._widen()

    def _widen(self) -> None:
        """Float32 copies of what is computed in float32; they belong to this version."""
        kind = wide(self.dtype)
        source = {**self.weights, "head": self.weights["embed" if self.config.tied else "head"]}
        self.wide = {name: source[name].to(kind) for name in WIDE_NAMES}

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the compute copy by one cast of `weights` (masters) and name its version.

        Storage addresses stay. Errors: RuntimeError when a tensor is missing or mis-shaped,
        before anything is written.
        """
        for name, old in self.weights.items():
            if name not in weights or weights[name].shape != old.shape:
                raise RuntimeError(f"publication of version {version}: tensor {name!r} is missing "
                                   f"or not of shape {tuple(old.shape)}")
        for name, old in self.weights.items():
            old.copy_(weights[name])
        self._widen()
        self.version = version

    def digest(self) -> str:
        """sha256 over name, dtype, shape and bytes of every tensor of the compute copy."""
        total = hashlib.sha256()
        for name in sorted(self.weights):
            weight = self.weights[name].detach().cpu()
            total.update(f"{name} {dtype_name(weight.dtype)} {tuple(weight.shape)}\n".encode())
            total.update(weight.reshape(-1).view(torch.uint8).numpy())
        return total.hexdigest()

    # The three verbs. `weights` replaces the compute copy when the dense forward needs a
    # graph; it holds the same values.

    def embed(self, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Token ids [R] int64 -> hidden states before loop 1 [R, H]."""
        return F.embedding(ids, (weights or self.weights)["embed"])

    def loop(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend,
             weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """One application of the shared stack: x [R, H] -> [R, H].

        cos, sin: float32 [R, 1, D] from `rotary` at the rows' positions. The returned state
        is normalised; it is what is read out and what the next loop takes.
        """
        w = weights or self.weights
        for layer in range(self.config.layers):
            x = self._layer(layer, x, cos, sin, attend, w)
        return rms_norm(x, w["norm"], self.config.rms_eps, self.profile)

    def _layer(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend,
               w: Mapping[str, Tensor]) -> Tensor:
        config, profile, eps, at = self.config, self.profile, self.config.rms_eps, f"core.{layer}."
        rows = x.shape[0]
        y = rms_norm(x, w[at + "norm_attn_in"], eps, profile)
        q = F.linear(y, w[at + "q"]).view(rows, config.heads, config.head_dim)
        k = F.linear(y, w[at + "k"]).view(rows, config.kv_heads, config.head_dim)
        v = F.linear(y, w[at + "v"]).view(rows, config.kv_heads, config.head_dim)
        mixed = attend(layer, rotate(q, cos, sin, profile), rotate(k, cos, sin, profile), v)
        mixed = F.linear(mixed.reshape(rows, -1), w[at + "o"])
        x = add_norm(x, mixed, w[at + "norm_attn_out"], eps, profile)
        y = rms_norm(x, w[at + "norm_mlp_in"], eps, profile)
        y = swiglu(F.linear(y, w[at + "gate"]), F.linear(y, w[at + "up"]), profile)
        y = F.linear(y, w[at + "down"])
        return add_norm(x, y, w[at + "norm_mlp_out"], eps, profile)

    def readout(self, h: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Hidden states after a loop [N, H] -> logits [N, V], float32 (float64 for float64)."""
        kind = wide(self.dtype)
        return F.linear(h.to(kind), (weights or self.wide)["head"].to(kind))

    def gate(self, h: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Exit-gate logits [N] of hidden states [N, H], float32 (float64 for float64).

        A row sum, not a matrix product of one column: that one's bits depend on the row's
        index on some CPUs.
        """
        w = weights or self.wide
        kind = wide(self.dtype)
        return (h.to(kind) * w["exit_gate.weight"].to(kind)).sum(-1) + w["exit_gate.bias"].to(kind)
