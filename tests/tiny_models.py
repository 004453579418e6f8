"""Tiny looped models for tests: odd sizes on purpose, random weights with a trained look.

`tiny_model` differs from `init_model` in what would hide faults there: norm weights are not 1,
the gate's bias is not 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.initial import init_model
from models.invariance import set_numerics
from models.looped import LoopedLM
from models.ouro import new_source, parse

GOLDEN = Path(__file__).parent / "data" / "golden"


def tiny_config(**changes) -> ModelConfig:
    """2 layers, 3 loops, 4 query heads over 2 kv heads, head_dim 6 (not hidden / heads)."""
    config = parse(new_source(hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, head_dim=6,
                              vocab=29, loops=3, max_positions=64, rope_theta=500.0))
    return replace(config, **changes)


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float64 weights by canonical name, representable in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in init_model(config, seed=seed).weights.items():
        if "norm" in name:
            value = 0.35 + 0.75 * torch.rand(value.shape, generator=generator)
        elif name.endswith("bias"):
            value = torch.full_like(value, -0.4)
        weights[name] = value.to(torch.bfloat16).double()
    return weights


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float64, profile: str = "hf", **changes) -> LoopedLM:
    """A `LoopedLM` of `tiny_config(**changes)`; the same values in every dtype."""
    config = tiny_config(**changes)
    weights = {name: w.to(dtype).clone() for name, w in tiny_weights(config, seed).items()}
    return LoopedLM(config, weights, profile=profile)


def wide_model(dtype: torch.dtype = torch.float32, *, linear: str = "native", **changes) -> LoopedLM:
    """Products of 256 and more terms, where kernels differ; 1 layer, 3 loops, 2,048 positions."""
    source = new_source(hidden=256, intermediate=696, layers=1, heads=4, kv_heads=2, vocab=64, loops=3,
                        max_positions=2048)
    return init_model(replace(parse(source), **changes), seed=1, dtype=str(dtype).removeprefix("torch."), linear=linear)


def keep_rule(model: LoopedLM, length: int) -> LoopedLM:
    """The model under numerics `invariant`; the test is skipped where no rule holds on this machine."""
    reason = set_numerics(model, "auto", length=length)
    if model.rule is None:
        pytest.skip(reason)
    return model


def tokens(count: int, vocab: int = 29, seed: int = 0) -> list[int]:
    """`count` random token ids."""
    generator = torch.Generator().manual_seed(seed * 1000 + count)
    return torch.randint(vocab, (count,), generator=generator).tolist()
