"""The slow, obvious Ouro: the published order of operations, one sequence, nothing shared
with `models/` but the official tensor names.

In bfloat16 it rounds where the official eager code rounds (every operator's output), so on
kernels that agree with the golden machine's it gives the golden bits. It takes the shapes of
the official code, [1, S, H] and [1, A, S, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_ouro(weights: dict[str, torch.Tensor], source: dict, ids: list[int],
               dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """hidden [T, S, H], gate_logit [T, S], logits [T, S, V], all in `dtype`; k, v [T, L, K, S, D].

    weights: official names. source: the decoded `config.json`, complete.
    """
    w = {name: value.to(dtype) for name, value in weights.items()}
    wide = torch.promote_types(dtype, torch.float32)
    heads, kv_heads, width = (source[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    size = len(ids)

    def norm(x, name):
        y = x.to(wide)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + source["rms_norm_eps"])
        return w[name] * y.to(dtype)

    def split(x, count):
        return x.view(1, size, count, width).transpose(1, 2)

    inv_freq = 1.0 / source["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(size).float()[:, None] * inv_freq[None]
    cos, sin = (f(torch.cat((angles, angles), -1)).to(dtype)[None, None] for f in (torch.cos, torch.sin))

    def rope(x):
        half = width // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    mask = torch.full((size, size), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    served = [a // (heads // kv_heads) for a in range(heads)]
    names = "model.layers.{}.{}.weight"
    states, gates, logits, keys, values = [], [], [], [], []
    x = w["model.embed_tokens.weight"][torch.tensor(ids)][None]
    for _ in range(source["total_ut_steps"]):
        for layer in range(source["num_hidden_layers"]):
            def linear(y, part, layer=layer):
                return F.linear(y, w[names.format(layer, part)])

            y = norm(x, names.format(layer, "input_layernorm"))
            q = rope(split(linear(y, "self_attn.q_proj"), heads))
            k = rope(split(linear(y, "self_attn.k_proj"), kv_heads))
            v = split(linear(y, "self_attn.v_proj"), kv_heads)
            keys.append(k[0])
            values.append(v[0])
            scores = q @ k[:, served].transpose(2, 3) * width ** -0.5 + mask
            shares = torch.softmax(scores, -1, dtype=wide).to(dtype)
            y = (shares @ v[:, served]).transpose(1, 2).reshape(1, size, -1)
            x = x + norm(linear(y, "self_attn.o_proj"), names.format(layer, "input_layernorm_2"))
            y = norm(x, names.format(layer, "post_attention_layernorm"))
            y = linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
            x = x + norm(y, names.format(layer, "post_attention_layernorm_2"))
        x = norm(x, "model.norm.weight")
        states.append(x[0])
        gates.append(F.linear(x, w["model.early_exit_gate.weight"], w["model.early_exit_gate.bias"])[0, :, 0])
        logits.append(F.linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))[0])
    shape = (source["total_ut_steps"], source["num_hidden_layers"], kv_heads, size, width)
    return {"hidden": torch.stack(states), "gate_logit": torch.stack(gates), "logits": torch.stack(logits),
            "k": torch.stack(keys).view(shape), "v": torch.stack(values).view(shape)}
