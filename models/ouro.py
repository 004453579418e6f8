"""Ouro (LoopLM): its `config.json` and its tensor names. Knows no arithmetic.

Every option of the published configuration class that would change the arithmetic is
either read or refused by name; absent fields take that class's defaults (which differ
from the published checkpoints: rope_theta is 10 000 when absent).
"""

from __future__ import annotations

from models.config import ModelConfig

ARCHITECTURE = "OuroForCausalLM"

# Class defaults of the published OuroConfig for fields a file may leave out.
DEFAULTS = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "total_ut_steps": 4,
    "early_exit_threshold": 1.0, "tie_word_embeddings": False, "rope_theta": 10000.0,
}

# Options that would change the function; the only values this project computes.
ONLY_VALUES = {
    "hidden_act": ("silu",), "rope_scaling": (None,), "use_sliding_window": (False, None),
    "attention_bias": (False, None), "mlp_bias": (False, None), "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None), "early_exit_step": (None,),
    "share_kv_across_loops": (False, None), "quantization_config": (None,),
}
# Inside `rope_parameters`, where newer libraries write the rotary settings.
ONLY_ROPE_VALUES = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1, None)}

LAYER_TENSORS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm_attn_in": "input_layernorm", "norm_attn_out": "input_layernorm_2",
    "norm_mlp_in": "post_attention_layernorm", "norm_mlp_out": "post_attention_layernorm_2",
}
OTHER_TENSORS = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "exit_gate.weight": "model.early_exit_gate.weight",
    "exit_gate.bias": "model.early_exit_gate.bias",
}


def parse(source: dict) -> ModelConfig:
    """Read an Ouro `config.json` (already decoded). ValueError names the field."""
    architectures = source.get("architectures") or []
    if source.get("model_type") != "ouro" and ARCHITECTURE not in architectures:
        raise ValueError(f"config.json: model_type = {source.get('model_type')!r}, architectures = "
                         f"{architectures!r}: only Ouro ({ARCHITECTURE}) is supported")
    if architectures and ARCHITECTURE not in architectures:
        raise ValueError(f"config.json: architectures = {architectures!r}: only {ARCHITECTURE} is "
                         "supported")
    _refuse_unsupported(source)

    hidden, heads = _value(source, "hidden_size"), _value(source, "num_attention_heads")
    if source.get("head_dim") is None and (heads < 1 or hidden % heads):
        raise ValueError(f"config.json: head_dim is absent and hidden_size = {hidden} is not a "
                         f"multiple of num_attention_heads = {heads}")
    # A null means "as many as query heads" to the published class; an absent field its default.
    kv_heads = heads if source.get("num_key_value_heads", 0) is None else _value(source, "num_key_value_heads")
    # A null threshold turns the official gate off: never early, as a threshold of 1 does here.
    threshold = 1.0 if source.get("early_exit_threshold", 0) is None else (
        _value(source, "early_exit_threshold", float))
    bos, pad = _ids(source, "bos_token_id"), _ids(source, "pad_token_id")
    return ModelConfig(
        family="ouro", hidden=hidden, intermediate=_value(source, "intermediate_size"), heads=heads,
        kv_heads=kv_heads,
        head_dim=_value(source, "head_dim") if source.get("head_dim") is not None else hidden // heads,
        vocab=_value(source, "vocab_size"), loops=_value(source, "total_ut_steps"),
        layers=_value(source, "num_hidden_layers"),
        max_positions=_value(source, "max_position_embeddings"), rope_theta=_rope_theta(source),
        rms_eps=_value(source, "rms_norm_eps", float),
        tied=_value(source, "tie_word_embeddings", bool),
        bos_id=bos[0] if bos else None, pad_id=pad[0] if pad else None,
        eos_ids=_ids(source, "eos_token_id"), exit_threshold=threshold, source=dict(source))


def _value(source: dict, name: str, kind: type = int, where: str = ""):
    """Field `name` or its class default, checked to be a `kind` (an integer passes as float)."""
    found = source.get(name, DEFAULTS.get(name))
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        found = float(found)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ValueError(f"config.json: {where}{name} = {found!r} must be of type {kind.__name__}")
    return found


def _refuse_unsupported(source: dict) -> None:
    _refuse_other_values(source, ONLY_VALUES, "")
    layer_types = source.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json: layer_types = {layer_types!r} must be a list")
    unusual = [kind for kind in layer_types if kind != "full_attention"]
    if unusual:
        raise ValueError(f"config.json: layer_types has {unusual[0]!r}: only 'full_attention' is "
                         "supported")


def _refuse_other_values(source: dict, only: dict[str, tuple], where: str) -> None:
    for name, allowed in only.items():
        if name in source and source[name] not in allowed:
            raise ValueError(f"config.json: {where}{name} = {source[name]!r} is not supported (only "
                             f"{allowed[0]!r} is)")


def _rope_theta(source: dict) -> float:
    """At top level, or inside `rope_parameters` where a newer library rewrote the file."""
    nested = source.get("rope_parameters")
    if nested is None:
        return _value(source, "rope_theta", float)
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: rope_parameters = {nested!r} must be an object")
    _refuse_other_values(nested, ONLY_ROPE_VALUES, "rope_parameters.")
    if "rope_theta" not in nested:
        return _value(source, "rope_theta", float)
    theta = _value(nested, "rope_theta", float, "rope_parameters.")
    if "rope_theta" in source and _value(source, "rope_theta", float) != theta:
        raise ValueError(f"config.json: rope_theta = {source['rope_theta']!r} stands beside "
                         f"rope_parameters.rope_theta = {theta!r}; make them agree")
    return theta


def to_json(config: ModelConfig) -> dict:
    """The `config.json` of `config`: the one it was read from, where that still says the same.

    A config that was changed since (other loops, say) or made by hand gets the fields that
    differ written over; `parse(to_json(config)) == config` always.
    """
    if config.source and parse(config.source) == config:
        return dict(config.source)
    fields = {
        "hidden_size": config.hidden, "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab, "total_ut_steps": config.loops,
        "max_position_embeddings": config.max_positions, "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps, "tie_word_embeddings": config.tied,
        "early_exit_threshold": config.exit_threshold, "bos_token_id": config.bos_id,
        "pad_token_id": config.pad_id, "layer_types": ["full_attention"] * config.layers,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids),
    }
    kept = {name: value for name, value in config.source.items() if name != "rope_parameters"}
    written = {"architectures": [ARCHITECTURE], "model_type": "ouro", "hidden_act": "silu"} | kept | fields
    if parse(written) != config:
        raise AssertionError(f"config.json written for {config} reads back as {parse(written)}")
    return written


def _ids(source: dict, name: str) -> tuple[int, ...]:
    found = source.get(name)
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"config.json: {name} = {found!r} must be a token id or a list of them")
    return tuple(ids)


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Canonical weight name -> name in the published safetensors file."""
    names = {}
    for name in config.weight_shapes():
        if name.startswith("core."):
            _, layer, part = name.split(".")
            names[name] = f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"
        else:
            names[name] = OTHER_TENSORS[name]
    return names


def new_source(*, hidden: int, intermediate: int, layers: int, heads: int, vocab: int, loops: int,
               kv_heads: int | None = None, head_dim: int | None = None, max_positions: int = 2048,
               rope_theta: float = 1e6, tied: bool = False, eos_id: int = 0, bos_id: int = 0) -> dict:
    """A `config.json` for a new Ouro-shaped model, readable by the official code too."""
    return {
        "architectures": [ARCHITECTURE], "model_type": "ouro", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim or hidden // heads, "vocab_size": vocab, "total_ut_steps": loops,
        "early_exit_threshold": 1.0, "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6, "rope_theta": rope_theta, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False,
        "layer_types": ["full_attention"] * layers, "tie_word_embeddings": tied,
        "attention_dropout": 0.0, "bos_token_id": bos_id, "eos_token_id": eos_id,
        "initializer_range": 0.02, "torch_dtype": "float32", "use_cache": True,
    }
