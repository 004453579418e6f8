"""Ouro's `config.json`: published values, class defaults, and every option that is refused by name."""

import json

import pytest
from tiny_models import GOLDEN, tiny_config

from models.config import ModelConfig
from models.ouro import new_source, parse, to_json

# Ouro-1.4B as published; -2.6B has 48 layers, its -Thinking sibling bos 1 and eos 2.
PUBLISHED = {
    "architectures": ["OuroForCausalLM"], "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"}, "bos_token_id": 0, "early_exit_threshold": 1.0,
    "eos_token_id": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5632, "layer_types": ["full_attention"] * 24, "max_position_embeddings": 65536,
    "max_window_layers": 24, "model_type": "ouro", "num_attention_heads": 16, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "total_ut_steps": 4,
    "transformers_version": "4.55.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 49152,
}


def without(*names):
    return {name: value for name, value in PUBLISHED.items() if name not in names}


def parameters(config):
    total = 0
    for shape in config.weight_shapes().values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


@pytest.mark.parametrize("layers, count, tensors, kv", [
    (24, 1_434_652_673, 269, 768 * 1024), (48, 2_667_974_657, 533, 1536 * 1024)])
def test_published_sizes(layers, count, tensors, kv):
    """Parameters, tensors and KV bytes a token of the published 1.4B and 2.6B."""
    config = parse(PUBLISHED | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers})
    assert parameters(config) == count and len(config.weight_shapes()) == tensors
    assert config.kv_bytes(2) * config.loops == kv
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (2048, 16, 16, 128)
    assert (config.loops, config.layers, config.vocab, config.intermediate) == (4, layers, 49152, 5632)
    assert (config.rope_theta, config.rms_eps, config.max_positions, config.tied) == (1e6, 1e-6, 65536, False)
    assert (config.bos_id, config.eos_ids, config.pad_id, config.exit_threshold) == (0, (0,), None, 1.0)
    assert (config.prelude_layers, config.coda_layers) == (0, 0)


def test_absent_fields_take_the_published_class_defaults():
    """rope_theta is 10 000 when absent, not the checkpoints' million; head_dim hidden / heads."""
    config = parse({"model_type": "ouro"})
    assert config == ModelConfig(
        family="ouro", hidden=4096, intermediate=22016, heads=32, kv_heads=32, head_dim=128, vocab=151936,
        loops=4, layers=32, max_positions=32768, rope_theta=10_000.0, rms_eps=1e-6, tied=False)


def test_head_dim_of_the_file_wins_over_hidden_by_heads():
    assert parse(PUBLISHED | {"head_dim": 64}).head_dim == 64
    assert parse(without("head_dim") | {"hidden_size": 1024}).head_dim == 64
    assert parse(PUBLISHED | {"head_dim": None}).head_dim == 128


def test_null_kv_heads_mean_plain_heads():
    assert parse(PUBLISHED | {"num_key_value_heads": None}).kv_heads == 16
    assert parse(PUBLISHED | {"num_key_value_heads": 4}).kv_heads == 4


@pytest.mark.parametrize("field, value", [
    ("rope_parameters", {"rope_type": "default", "rope_theta": 250000.0}), ("rope_theta", 250000),
    ("rope_parameters", {"rope_theta": 250000})])
def test_rope_theta_at_either_place(field, value):
    """transformers 5 writes it inside rope_parameters; an integer counts as a number."""
    assert parse(without("rope_theta") | {field: value}).rope_theta == 250000.0


@pytest.mark.parametrize("field, value, found", [
    ("eos_token_id", 2, (2,)), ("eos_token_id", [2, 0], (2, 0)), ("eos_token_id", None, ())])
def test_eos_may_be_one_id_or_a_list(field, value, found):
    assert parse(PUBLISHED | {field: value}).eos_ids == found


@pytest.mark.parametrize("change, message", [
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"model_type = 'llama'.*only Ouro"),
    ({"architectures": ["OuroForSequenceClassification"]}, r"architectures = .*only OuroForCausalLM"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = "),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ({"layer_types": "full_attention"}, "layer_types = 'full_attention' must be a list"),
    ({"attention_bias": True}, "attention_bias = True"), ({"mlp_bias": True}, "mlp_bias = True"),
    ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ({"early_exit_step": 2}, "early_exit_step = 2"),
    ({"share_kv_across_loops": True}, "share_kv_across_loops = True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = "),
    ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type = 'yarn'"),
    ({"rope_parameters": {"type": "linear"}}, r"rope_parameters\.type = 'linear'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor = 0\.5"),
    ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_theta = 1000000\.0 stands beside rope_parameters"),
    ({"rope_parameters": 7}, "rope_parameters = 7 must be an object"),
    ({"rope_theta": None}, "rope_theta = None must be of type float"),
    ({"rope_theta": "1e6"}, "rope_theta = '1e6' must be of type float"),
    ({"rope_theta": 0}, r"rope_theta = 0\.0 must be a positive number"),
    ({"rms_norm_eps": -1e-6}, "rms_eps = -1e-06 must be a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_eps = nan must be a positive number"),
    ({"hidden_size": 2048.0}, r"hidden_size = 2048\.0 must be of type int"),
    ({"vocab_size": True}, "vocab_size = True must be of type int"),
    ({"total_ut_steps": 0}, "loops = 0 must be a positive integer"),
    ({"num_hidden_layers": -1}, "layers = -1 must be a positive integer"),
    ({"num_key_value_heads": 3}, "heads = 16 is not a multiple of kv_heads = 3"),
    ({"head_dim": 7}, "head_dim = 7 must be even"),
    ({"head_dim": None, "hidden_size": 2047}, "head_dim is absent and hidden_size = 2047"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be of type bool"),
    ({"early_exit_threshold": "x"}, "early_exit_threshold = 'x' must be of type float"),
    ({"eos_token_id": "</s>"}, "eos_token_id = '</s>' must be a token id"),
    ({"eos_token_id": [1, -2]}, r"eos_token_id = \[1, -2\] must be a token id"),
    ({"bos_token_id": 1.5}, r"bos_token_id = 1\.5 must be a token id"),
], ids=lambda c: "-".join(c) if isinstance(c, dict) else "")
def test_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        parse(PUBLISHED | change)


@pytest.mark.parametrize("field", ["prelude_layers", "coda_layers"])
def test_layers_outside_the_loops_are_refused_until_a_family_needs_them(field):
    with pytest.raises(ValueError, match=rf"{field} = 1.*not supported yet"):
        tiny_config(**{field: 1})


def test_harmless_fields_are_carried_not_judged():
    source = PUBLISHED | {"sliding_window": 4096, "something_new": [1], "torch_dtype": "float16"}
    assert to_json(parse(source)) == source


def test_the_published_file_is_written_back_unchanged():
    source = json.loads((GOLDEN / "ouro-tiny-a" / "config.json").read_text())
    assert to_json(parse(source)) == source
    rewritten = without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}
    assert to_json(parse(rewritten)) == rewritten


def test_a_new_source_is_read_back():
    config = parse(new_source(hidden=32, intermediate=48, layers=3, heads=4, vocab=17, loops=2, tied=True, eos_id=3))
    assert (config.hidden, config.kv_heads, config.head_dim, config.tied) == (32, 4, 8, True)
    assert (config.layers, config.loops, config.vocab, config.eos_ids) == (3, 2, 17, (3,))


def test_kv_bytes_by_hand():
    """2 (keys and values) x 2 layers x 2 heads x 6 wide x 4 bytes."""
    assert tiny_config().kv_bytes(4) == 192
