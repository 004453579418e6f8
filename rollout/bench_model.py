"""The models that a benchmark runs, and how far their loops agree on the text of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.engine import Completion
from models.checkpoint import load_model, read_config
from models.config import ModelConfig
from models.dense import dense_forward, pack
from models.invariance import set_numerics
from models.linear import KINDS
from models.logprob import entropy
from models.looped import LoopedLM
from models.synthetic import PREFIX, synthetic_config, synthetic_model

MOST_POSITIONS = 512  # read out for the agreement: its standard error is then at most 2.2 %
ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Agreement:
    """What the loops of a model know of each other, on positions of generated text.

    Attributes:
        tokens: positions looked at.
        shares: of loop 1..T-1, positions whose most likely token is that of loop T.
        entropy: mean of loop T's next-token entropies, nats.
    """

    tokens: int
    shares: tuple[float, ...]
    entropy: float


def model_config(name: str) -> ModelConfig:
    """The config of a model folder or of `synthetic:HIDDENxLAYERSxVOCAB`; reads no weights."""
    return synthetic_config(name) if name.startswith(PREFIX) else read_config(name)


def make_models(name: str, config: ModelConfig, *, linear: str, numerics: str, length: int, dtype: str,
                device: torch.device, profile: str) -> list[tuple[LoopedLM, str]]:
    """The model on the named linear operator, or on each of them, and a line on its numerics.

    linear: as in `load_model`, or `each`. length: tokens of the longest sequence. Errors: ValueError
    as in `load_model` and `set_numerics`.
    """
    found, options = [], {"dtype": dtype, "device": device, "profile": profile}
    for kind in KINDS if linear == "each" else (linear,):
        if name.startswith(PREFIX):
            model = synthetic_model(config, linear=kind, **options)
        else:
            model = load_model(name, linear=kind, **options)
        found.append((model, set_numerics(model, numerics, length=length)))
    return found


@torch.no_grad()
def agreement(model: LoopedLM, completions: Sequence[Completion]) -> Agreement:
    """How far loops agree where these texts were read out: one dense forward over a part of them."""
    sequences, firsts, positions = [], [], 0
    for done in completions:
        if positions >= MOST_POSITIONS:
            break
        sequences.append([*done.request.prompt, *done.token_ids[:-1]])  # the last token is no input
        firsts.append(len(done.request.prompt) - 1)
        positions += len(done.token_ids)
    packed = pack(sequences, model)
    rows = torch.cat([torch.arange(start + first, stop) for start, first, stop in
                      zip(packed.starts, firsts, packed.starts[1:], strict=False)]).to(model.device)
    states = [state[rows] for state in dense_forward(model, packed, model.config.loops)]
    same, bits = torch.zeros(model.config.loops, dtype=torch.int64), 0.0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        logits = [model.readout(state[start:start + ROWS_AT_ONCE]) for state in states]
        best = torch.stack([each.argmax(-1) for each in logits])
        same += (best == best[-1]).sum(-1).cpu()
        bits += entropy(logits[-1]).double().sum().item()
    return Agreement(len(rows), tuple((same[:-1] / len(rows)).tolist()), bits / len(rows))
