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
from models.linear import KINDS, linear, pack, pad_rows
from models.numerics import dtype_name, dtype_of, wide
from models.rotary import Rotary
from models.rounding import add_norm, attention_kernel, check_profile, rms_norm, rotate, swiglu
from models.rule import Rule

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [R, A, D], k [R, K, D], v [R, K, D]) -> [R, A, D]; k is already rotated."""

# What decides the function besides the weights' bits.
FUNCTION_FIELDS = ("family", "heads", "kv_heads", "head_dim", "loops", "rope_theta", "rms_eps", "tied")
WIDE_NAMES = ("exit_gate.weight", "exit_gate.bias")


class LoopedLM:
    """Weights (the compute copy of one policy version) and the verbs over them.

    Loading in a dtype (`load_model(dtype=...)`) is the only way to have the model in it: there
    is no `.to()`, which would cast the rotary frequencies along and leave wide copies behind.

    Attributes:
        config, profile, dtype, device: fixed at construction.
        weights: canonical name -> tensor, contiguous, owned storage (never a view of a
            mapped file: a weight 4 bytes off a 16-byte boundary gives other bits).
        wide: float32 (float64 for references) exit gate and head, under the same names;
            "head" is there for a tied model too.
        version: policy version, the number of optimizer steps behind these weights.
        kernel: attention kernel, `eager` or `sdpa`.
        linear: linear operator, `native` or `packed` (`models/linear.py`).
        packed: packed copies of the stack's matrices and of the wide head, under the same names;
            empty for `native`.
        rule: the canonical shape rule that this model keeps (numerics `invariant`), or None
            (`shapes`); set by `models/invariance.py`, before the first pass.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, profile: str = "hf",
                 linear: str = "native", version: int = 0):
        shapes = config.weight_shapes()
        if set(weights) != set(shapes):
            raise AssertionError(f"weights do not match the config: {set(weights) ^ set(shapes)}")
        self.config = config
        self.profile = check_profile(profile)
        self.weights = {name: weights[name] for name in shapes}
        self.dtype = self.weights["embed"].dtype
        self.device = self.weights["embed"].device
        dtype_of(dtype_name(self.dtype))
        for name, weight in self.weights.items():
            self._check_weight(name, weight, shapes[name])
        self.version = version
        self.kernel = attention_kernel(profile, self.dtype)
        self.rotary = Rotary(config.head_dim, config.rope_theta, self.device)
        self.wide = {name: weight.detach().to(wide(self.dtype))
                     for name, weight in self._wide_sources().items()}
        if linear not in KINDS:
            raise AssertionError(f"linear operator {linear!r} is none of {KINDS}")
        self.linear = linear
        self.packed = self._pack()
        self.rule: Rule | None = None
        self._digest: tuple[tuple, str] | None = None  # weights' addresses and versions, and their digest

    @property
    def numerics(self) -> str:
        """`invariant` while a shape rule is kept, else `shapes`."""
        return "shapes" if self.rule is None else "invariant"

    @property
    def kernels(self) -> dict:
        """What decides bits beside weights, dtype and profile, as plain values for logs and checkpoints."""
        return {"numerics": self.numerics, "rule": {} if self.rule is None else dict(vars(self.rule)),
                "linear": self.linear, "attention": self.kernel}

    def _pack(self) -> dict[str, Tensor]:
        if self.linear == "native":
            return {}
        stack = {name: weight for name, weight in self.weights.items()
                 if name.startswith("core.") and weight.dim() == 2}
        return {name: pack(weight) for name, weight in {**stack, "head": self.wide["head"]}.items()}

    def _check_weight(self, name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(weight.shape) != shape or not weight.is_contiguous():
            raise AssertionError(f"{name}: shape {tuple(weight.shape)}, strides {weight.stride()}; "
                                 f"expected {shape}, row-major")
        if weight.data_ptr() % 16:
            raise AssertionError(f"{name} starts off a 16-byte boundary; give it own storage")
        if weight.dtype != self.dtype or weight.device != self.device:
            raise AssertionError(f"{name} is {weight.dtype} on {weight.device}, embed is "
                                 f"{self.dtype} on {self.device}")

    def _wide_sources(self) -> dict[str, Tensor]:
        """The weights that are computed with in float32; their copies belong to this version."""
        head = self.weights["embed" if self.config.tied else "head"]
        return {**{name: self.weights[name] for name in WIDE_NAMES}, "head": head}

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the compute copy by one cast of `weights` (masters) and name its version.

        Storage addresses stay, those of the wide copies too; packed copies are made anew. Errors: RuntimeError when a
        tensor is missing, unknown or mis-shaped, before anything is written.
        """
        unknown = sorted(set(weights) - set(self.weights))
        if unknown:
            raise RuntimeError(f"publication of version {version}: tensor {unknown[0]!r} is not one "
                               "of the model's")
        for name, old in self.weights.items():
            if name not in weights or weights[name].shape != old.shape:
                raise RuntimeError(f"publication of version {version}: tensor {name!r} is missing "
                                   f"or not of shape {tuple(old.shape)}")
        with torch.no_grad():  # masters may require gradients; the compute copy never does
            for name, old in self.weights.items():
                old.copy_(weights[name])
            for name, source in self._wide_sources().items():
                if self.wide[name].data_ptr() != source.data_ptr():  # the same tensor in float32
                    self.wide[name].copy_(source)
            self.packed.clear()  # before the new ones are made: two sets need not fit
            self.packed = self._pack()
        self.version = version

    def digest(self) -> str:
        """sha256 of the function: the config fields that decide it, and name, dtype, shape and
        bytes of every tensor of the compute copy.

        Kept while no tensor has been written to, which torch counts in each tensor's version; writing
        past that counter (`.data`, `.numpy()`) is not seen.
        """
        state = tuple((weight.data_ptr(), weight._version) for weight in self.weights.values())
        if self._digest is None or self._digest[0] != state:
            self._digest = state, self._hash()
        return self._digest[1]

    def _hash(self) -> str:
        total = hashlib.sha256()
        total.update(" ".join(f"{name}={getattr(self.config, name)}" for name in FUNCTION_FIELDS).encode())
        for name in sorted(self.weights):
            weight = self.weights[name].detach().cpu()
            total.update(f"{name} {dtype_name(weight.dtype)} {tuple(weight.shape)}\n".encode())
            total.update(weight.reshape(-1).view(torch.uint8).numpy())
        return total.hexdigest()

    # The three verbs. `weights` replaces the compute copy when the dense forward needs a
    # graph; it holds the same values (packed copies are multiplied with either way).

    def _product(self, x: Tensor, name: str, weight: Tensor) -> Tensor:
        block = None if self.rule is None else (self.rule.head_block if name == "head" else self.rule.row_block)
        return linear(x, weight, self.packed.get(name), block)

    def embed(self, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Token ids [R] int64 -> hidden states before loop 1 [R, H]."""
        return F.embedding(ids, (self.weights if weights is None else weights)["embed"])

    def loop(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend,
             weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """One application of the shared stack: x [R, H] -> [R, H].

        cos, sin: float32 [R, 1, D] from `rotary` at the rows' positions. The returned state
        is normalised; it is what is read out and what the next loop takes. Under a shape rule R is
        a multiple of its `rows`.
        """
        if self.rule is not None and x.shape[0] % self.rule.rows:
            raise AssertionError(f"{x.shape[0]} rows break the shape rule, which pads to multiples of {self.rule.rows}")
        w = self.weights if weights is None else weights
        for layer in range(self.config.layers):
            x = self._layer(layer, x, cos, sin, attend, w)
        return rms_norm(x, w["norm"], self.config.rms_eps, self.profile)

    def _layer(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend,
               w: Mapping[str, Tensor]) -> Tensor:
        config, profile, eps, at = self.config, self.profile, self.config.rms_eps, f"core.{layer}."
        rows = x.shape[0]
        y = rms_norm(x, w[at + "norm_attn_in"], eps, profile)

        def product(x: Tensor, name: str) -> Tensor:
            return self._product(x, at + name, w[at + name])

        q = product(y, "q").view(rows, config.heads, config.head_dim)
        k = product(y, "k").view(rows, config.kv_heads, config.head_dim)
        v = product(y, "v").view(rows, config.kv_heads, config.head_dim)
        mixed = attend(layer, rotate(q, cos, sin, profile), rotate(k, cos, sin, profile), v)
        mixed = product(mixed.reshape(rows, -1), "o")
        x = add_norm(x, mixed, w[at + "norm_attn_out"], eps, profile)
        y = rms_norm(x, w[at + "norm_mlp_in"], eps, profile)
        y = swiglu(product(y, "gate"), product(y, "up"), profile)
        y = product(y, "down")
        return add_norm(x, y, w[at + "norm_mlp_out"], eps, profile)

    def readout(self, h: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Hidden states after a loop [N, H] -> logits [N, V], float32 (float64 for float64).

        `weights` of a tied model may bring a "head" of their own, the embedding in float32: its
        gradient is then not rounded on the way to the embedding's.
        """
        w = self.wide if weights is None else weights
        kind = wide(self.dtype)
        head = w["head" if "head" in w else "embed"].to(kind)
        padded = h if self.rule is None else pad_rows(h, self.rule.head_rows)
        return self._product(padded.to(kind), "head", head)[:h.shape[0]]

    def gate(self, h: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Exit-gate logits [N] of hidden states [N, H], float32 (float64 for float64).

        A row sum, not a matrix product of one column: that one's bits depend on the row's
        index on some CPUs.
        """
        w = self.wide if weights is None else weights
        kind = wide(self.dtype)
        return (h.to(kind) * w["exit_gate.weight"].to(kind)).sum(-1) + w["exit_gate.bias"].to(kind)
