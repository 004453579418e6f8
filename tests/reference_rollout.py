"""The slow, obvious rollout: one sequence at a time, the whole text forward again for each token.

No cache, no schedule, no batch: the dense forward read out at the exit depth. What the engine
gives must be this, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.engine import Request
from engine.sampler import Sampling, sample
from engine.schedule import Schedule, parse_schedule
from models.attention import attention
from models.dense import dense_forward, pack
from models.exits import exit_cdf, exit_distribution, exit_loop
from models.looped import LoopedLM


@dataclass
class Expected:
    """One text: ids, log-probs, exit depths, finish reason (`stop` or `length`)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    reason: str = "length"


@torch.no_grad()
def dense_states(model: LoopedLM, tokens: list[int]) -> torch.Tensor:
    """Hidden states [T, S, H] of one sequence after every loop."""
    return torch.stack(dense_forward(model, pack([tokens], model), model.config.loops))


@torch.no_grad()
def dense_logits(model: LoopedLM, tokens: list[int]) -> torch.Tensor:
    """Logits [T, S, V] read out after every loop."""
    return torch.stack([model.readout(h) for h in dense_states(model, tokens)])


@torch.no_grad()
def dense_keys_values(model: LoopedLM, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [T, L, S, K, D] of one sequence, by the model's own verbs."""
    cos, sin = model.rotary(torch.arange(len(tokens)), len(tokens) - 1)
    keys, values = [], []

    def attend(layer, q, k, v):
        keys.append(k)
        values.append(v)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, None, model.kernel)[0].transpose(0, 1)

    x = model.embed(torch.tensor(tokens))
    for _ in range(model.config.loops):
        x = model.loop(x, cos, sin, attend)
    shape = (model.config.loops, model.config.layers, *keys[0].shape)
    return torch.stack(keys).view(shape), torch.stack(values).view(shape)


def gate_cdf(model: LoopedLM, states: torch.Tensor) -> torch.Tensor:
    """Cumulative exit probability [S, T], float32, of hidden states [T, S, H]."""
    with torch.no_grad():
        return exit_cdf(exit_distribution(torch.stack([model.gate(h) for h in states])))


def gate_depths(schedule: Schedule, cdf: torch.Tensor) -> list[int]:
    """Exit depth of each row of cdf [S, T] under an exit:gate schedule."""
    return exit_loop(cdf, schedule.threshold).clamp(schedule.low, schedule.high).tolist()


@torch.no_grad()
def reference_rollout(model: LoopedLM, text: str, request: Request, sampling: Sampling) -> Expected:
    """Generate one request under schedule `text`."""
    schedule = parse_schedule(text, model.config.loops)
    tokens, found = list(request.prompt), Expected()
    for index in range(request.max_new_tokens):
        position = len(tokens) - 1
        states = dense_states(model, tokens)
        depth = schedule.depth(sampling.seed, request.uid, position, index)
        if depth is None:
            depth = gate_depths(schedule, gate_cdf(model, states)[-1:])[0]
        ids, logprobs = sample(model.readout(states[depth - 1, -1:]), sampling, [request.uid], [position])
        tokens.append(ids.item())
        found.ids.append(ids.item())
        found.logprobs.append(logprobs.item())
        found.depths.append(depth)
        if tokens[-1] in sampling.stop_ids:
            found.reason = "stop"
            break
    return found
