"""Keyed sampling: the noise of a token is a pure function of (seed, uid, position).

Gumbel-max over logits / temperature with Philox-4x32-10 noise: counter = (uid low, uid
high, position, vocabulary block), key = the 64-bit seed, word w of block b belongs to token
4 b + w, u = (x + 0.5) 2^-32, Gumbel and addition in float64. Position is that of the row
read out. No batch, schedule or rank enters. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.philox import philox, split64
from models.logprob import token_logprob

VERSION = 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when a text ends.

    Attributes:
        seed: 64-bit key of all random numbers, >= 0.
        temperature: divides the logits, > 0; log-probabilities are recorded under it.
        greedy: take the most likely token (evaluation); noise is not drawn.
        stop_ids: ids that end a text (the id is kept and trained).
        stop_strings: texts that end it; the token that completes one is the last one kept.
    """

    seed: int = 0
    temperature: float = 1.0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed = {self.seed} must be in 0..2^64-1")
        if not (0 < self.temperature < float("inf")):
            raise ValueError(f"temperature = {self.temperature} must be a finite number above 0 "
                             "(for the most likely token use greedy)")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings holds an empty text; remove it")


def gumbel_noise(seed: int, uids: Sequence[int], positions: Sequence[int], vocab: int,
                 device: torch.device) -> Tensor:
    """Standard Gumbel noise, float64 [N, V], for N (uid, position) pairs."""
    words = torch.tensor([split64(uid) for uid in uids], dtype=torch.int64, device=device)
    place = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]
    block = torch.arange(-(-vocab // 4), device=device)[None]
    found = philox((words[:, :1], words[:, 1:], place, block), split64(seed))
    bits = torch.stack(torch.broadcast_tensors(*found), -1).flatten(1)[:, :vocab]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def lowest_argmax(scores: Tensor) -> Tensor:
    """Index of the row maximum [N, V] -> [N], the lowest one on ties, on every device."""
    best = scores.max(-1, keepdim=True).values
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == best, ids, scores.shape[-1]).min(-1).values


def sample(logits: Tensor, sampling: Sampling, uids: Sequence[int],
           positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and their log-probabilities float32 [N] for logits [N, V].

    Errors: RuntimeError when a row of logits is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeError("logits are not finite: the weights or the hidden states hold NaN or "
                           "infinity")
    if sampling.greedy:
        ids = lowest_argmax(logits)
    else:
        noise = gumbel_noise(sampling.seed, uids, positions, logits.shape[-1], logits.device)
        ids = lowest_argmax((logits / sampling.temperature).to(torch.float64) + noise)
    return ids, token_logprob(logits, ids, sampling.temperature)
