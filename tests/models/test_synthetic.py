"""The benchmark's random models: their form, and loops that agree as often as the text says."""

import math

import pytest
import torch

from models.dense import dense_forward, pack
from models.initial import init_model
from models.logprob import entropy
from models.ouro import parse, to_json
from models.synthetic import synthetic_config, synthetic_model


def test_the_form_of_the_name():
    config = synthetic_config("synthetic:128x3x300")
    assert (config.hidden, config.layers, config.vocab, config.heads, config.kv_heads) == (128, 3, 300, 2, 2)
    assert (config.head_dim, config.loops, config.intermediate, config.tied) == (64, 4, 352, False)
    assert parse(to_json(config)) == config


@pytest.mark.parametrize("name, said", [
    ("synthetic:", "HIDDENxLAYERSxVOCAB"), ("synthetic:64x2", "HIDDENxLAYERSxVOCAB"),
    ("synthetic:64x0x9", "HIDDENxLAYERSxVOCAB"), ("synthetic:64x-1x9", "HIDDENxLAYERSxVOCAB"),
    ("synthetic:100x2x9", "HIDDEN = 100 must be a multiple of 64.*use 128"), ("synthetic:64x2x1", "VOCAB = 1")])
def test_a_name_without_a_model_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        synthetic_config(name)


def test_weights_by_hand():
    """L = 2, V = 256: branches at 0.03 / sqrt(4 ln 256), the head twice 0.8 sqrt(2 ln 256) times a new model's."""
    config = synthetic_config("synthetic:64x2x256")
    found, plain = synthetic_model(config, seed=1).weights, init_model(config, seed=1).weights
    branch, head = 0.03 / math.sqrt(4 * math.log(256)), 1.6 * math.sqrt(2 * math.log(256))
    for name, weight in plain.items():
        scale = head if name == "head" else branch if name.endswith(("attn_out", "mlp_out")) else 1
        assert torch.equal(found[name], weight * scale), name


def agreement(model, positions=768):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.vocab, (positions // 96, 96), generator=generator).tolist()
    with torch.no_grad():
        states = dense_forward(model, pack(texts, model), 4)
        logits = [model.readout(state) for state in states]
    best = torch.stack([each.argmax(-1) for each in logits])
    return (best == best[-1]).double().mean(-1).tolist(), entropy(logits[-1]).mean().item()


@pytest.mark.parametrize("name, dtype", [
    ("128x4x256", "float32"), ("256x2x1024", "float32"), ("128x4x256", "bfloat16")])
def test_loops_agree_about_as_a_trained_models_do(name, dtype):
    """94 % at loop 1, more at each loop; half of that where the branches are not damped."""
    config = synthetic_config(f"synthetic:{name}")
    shares, bits = agreement(synthetic_model(config, dtype=dtype))
    assert 0.90 < shares[0] < 0.97 and shares == sorted(shares) and shares[3] == 1
    assert 0.3 * math.log(config.vocab) < bits < 0.55 * math.log(config.vocab)
    if dtype == "float32":
        assert agreement(init_model(config, seed=0), 192)[0][0] < 0.5
