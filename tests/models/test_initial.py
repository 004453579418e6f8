"""Random models: keyed by seed and name, and of a size that lets a first step work."""

import math

import pytest
import torch
from tiny_models import tiny_config, tokens

from models.dense import dense_forward, pack
from models.initial import init_model
from models.logprob import entropy


def test_a_seed_is_a_model():
    first, again, other = (init_model(tiny_config(), seed=s) for s in (3, 3, 4))
    assert first.digest() == again.digest() != other.digest()


def test_a_tensor_does_not_depend_on_the_others():
    """Another layer, or a tied head, moves no weight that both models have."""
    usual, deeper = init_model(tiny_config(), seed=3), init_model(tiny_config(layers=3, tied=True), seed=3)
    shared = usual.weights.keys() & deeper.weights.keys()
    assert "core.1.down" in shared and "head" not in shared
    assert all(torch.equal(usual.weights[name], deeper.weights[name]) for name in shared)
    assert not torch.equal(usual.weights["core.0.q"], usual.weights["core.1.q"])


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    init_model(tiny_config(), seed=3)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales(dtype):
    model = init_model(tiny_config(hidden=64, intermediate=256, vocab=512), seed=0, dtype=dtype)
    for name, fan_in in (("core.0.q", 64), ("core.1.down", 256), ("core.0.up", 64)):
        assert model.weights[name].float().std().item() == pytest.approx(fan_in ** -0.5, rel=0.1)
    assert (model.weights["norm"] == 1).all() and (model.weights["exit_gate.bias"] == 0).all()
    logits = model.readout(dense_forward(model, pack([tokens(50, 512)], model), 3)[-1])
    assert entropy(logits).mean().item() > math.log(512) - 0.3, "first predictions are near uniform"
