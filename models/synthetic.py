"""Random models whose loops agree about as a trained model's do: what the benchmark runs.

Ouro geometry, heads of 64, MLP 11/4 as wide, T = 4, untied. In a plain random model every branch
is as large as the residual stream, so the loops disagree on most tokens. Here the sandwich norms
shrink the branches to DAMPING / sqrt(2 L ln V): each loop pushes the state in about the same
direction, the 2 L branches of a loop turn it by an angle proportional to their size times sqrt(2 L),
and the most likely of V random logits changes with a probability proportional to that angle times
sqrt(ln V). So one constant serves every size: the top token of loop 1 is that of loop T on about
94 % of positions (93 to 95 % in the mean over seeds, 128x4x256 to 1024x8x4096, float32 and
bfloat16; one small model may lie 2 % off). The head gives logits of standard deviation
PEAK * sqrt(2 ln V): 2.9 nats of entropy at V = 256, 3.7 at 2048, 4.0 at 4096.
"""

from __future__ import annotations

import math

import torch

from models import ouro
from models.config import ModelConfig
from models.initial import init_model
from models.looped import LoopedLM

PREFIX = "synthetic:"
FORM = "synthetic:HIDDENxLAYERSxVOCAB"
HEAD_DIM = 64
LOOPS = 4
MAX_POSITIONS = 65536  # those of the published models
DAMPING = 0.03
PEAK = 0.8


def synthetic_config(name: str) -> ModelConfig:
    """The config that `synthetic:HIDDENxLAYERSxVOCAB` names. ValueError for another text."""
    parts = name.removeprefix(PREFIX).split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"model = {name!r}: write {FORM}, for example synthetic:1024x8x4096")
    hidden, layers, vocab = map(int, parts)
    if hidden % HEAD_DIM:
        raise ValueError(f"model = {name!r}: HIDDEN = {hidden} must be a multiple of {HEAD_DIM}, the width of a head; "
                         f"use {-(-hidden // HEAD_DIM) * HEAD_DIM}")
    if vocab < 2:
        raise ValueError(f"model = {name!r}: VOCAB = {vocab} must be at least 2")
    return ouro.parse(ouro.new_source(
        hidden=hidden, intermediate=-(-hidden * 11 // 4 // 16) * 16, layers=layers, heads=hidden // HEAD_DIM,
        vocab=vocab, loops=LOOPS, max_positions=MAX_POSITIONS))


def synthetic_model(config: ModelConfig, *, seed: int = 0, dtype: str = "float32",
                    device: str | torch.device = "cpu", profile: str = "hf", linear: str = "native") -> LoopedLM:
    """Random weights for `config`, damped as the module's text says."""
    model = init_model(config, seed=seed, dtype=dtype, device=device, profile=profile, linear=linear)
    spread = math.sqrt(2 * math.log(config.vocab))
    branch = DAMPING / (math.sqrt(config.layers) * spread)
    scales = {name: branch for name in model.weights if name.endswith(("norm_attn_out", "norm_mlp_out"))}
    scales["head"] = 2 * PEAK * spread  # init_model's head gives logits of standard deviation 1/2
    model.publish({name: weight * scales.get(name, 1) for name, weight in model.weights.items()}, model.version)
    return model
