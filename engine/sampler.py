"""Keyed sampling: the noise of a token is a pure function of (seed, uid, position).

Gumbel-max over logits / temperature with Philox-4x32-10 noise: counter = (uid low, uid
high, position, vocabulary block), key = the 64-bit seed, word w of block b belongs to token
4 b + w, u = (x + 0.5) 2^-32, Gumbel and addition in float64. Position is that of the row
read out. No batch, schedule or rank enters. Ties go to the lowest id, which is the one that
torch's argmax documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
        if not is_word64(self.seed):
            raise ValueError(f"seed = {self.seed!r} must be an integer in 0..2^64-1")
        if not (0 < self.temperature < float("inf")):
            raise ValueError(f"temperature = {self.temperature!r} must be a finite number above 0 "
                             "(for the most likely token use greedy)")
        wrong = next((i for i in self.stop_ids if not is_word64(i)), None)
        if wrong is not None:
            raise ValueError(f"stop_ids holds {wrong!r}; give token ids, integers of at least 0")
        if isinstance(self.stop_strings, str):
            raise ValueError(f"stop_strings = {self.stop_strings!r} must be a tuple of texts; a text "
                             "alone would stop at each of its characters")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings holds an empty text; remove it")


def is_word64(value: object) -> bool:
    """Whether `value` is an integer (no bool) in 0..2^64-1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def gumbel_noise(seed: int, uids: Sequence[int], positions: Sequence[int], vocab: int,
                 device: torch.device) -> Tensor:
    """Standard Gumbel noise, float64 [N, V], for N (uid, position) pairs."""
    words = np.array([(*split64(uid), place) for uid, place in zip(uids, positions, strict=True)],
                     dtype=np.int64)
    block = np.arange(-(-vocab // 4))[None]
    if device.type != "cpu":  # numpy's calls on few numbers take a third of torch's time
        words, block = torch.from_numpy(words).to(device), torch.from_numpy(block).to(device)
    found = philox((words[:, :1], words[:, 1:2], words[:, 2:], block), split64(seed))
    bits = torch.stack([torch.as_tensor(part) for part in found], -1).flatten(1)[:, :vocab]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def sample(logits: Tensor, sampling: Sampling, uids: Sequence[int],
           positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and their log-probabilities float32 [N] for logits [N, V].

    Errors: RuntimeError when a logit divided by the temperature is not finite.
    """
    scaled = logits / sampling.temperature
    if not bool(torch.isfinite(scaled).all()):
        raise RuntimeError(f"logits / temperature are not finite (temperature = {sampling.temperature}"
                           "): the weights or the hidden states hold NaN or infinity, or the "
                           "temperature is too small")
    if sampling.greedy:
        ids = logits.argmax(-1)
    else:
        noise = gumbel_noise(sampling.seed, uids, positions, logits.shape[-1], logits.device)
        ids = (scaled.to(torch.float64) + noise).argmax(-1)
    return ids, token_logprob(logits, ids, sampling.temperature).to(torch.float32)
