"""Random weights for a new model: pre-training, tests, benchmarks."""

from __future__ import annotations

import hashlib

import torch

from models.config import ModelConfig
from models.linear import choose_linear
from models.looped import LoopedLM
from models.numerics import dtype_of


def init_model(config: ModelConfig, *, seed: int, dtype: str = "float32",
               device: str | torch.device = "cpu", profile: str = "hf",
               linear: str = "native") -> LoopedLM:
    """A model with matrices of standard deviation fan_in^-0.5, embedding 1, norms 1.

    The head gets half of that, so that first predictions are near uniform. Each tensor has
    its own generator, keyed by (seed, name): adding a tensor does not move the others.
    """
    linear = choose_linear(linear, dtype_of(dtype), device, config.hidden * config.heads * config.head_dim)
    weights = {}
    for name, shape in config.weight_shapes().items():
        key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        if len(shape) == 1:
            value = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            scale = 1.0 if name == "embed" else shape[1] ** -0.5
            value = torch.randn(shape, generator=generator) * (scale / 2 if name == "head" else scale)
        weights[name] = value.to(dtype=dtype_of(dtype), device=device)
    return LoopedLM(config, weights, profile=profile, linear=linear)
