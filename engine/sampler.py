"""Keyed sampling: the noise of a token is a pure function of (seed, uid, position).

Gumbel-max over logits / temperature with Philox-4x32-10 noise: counter = (uid low, uid
high, position, vocabulary block), key = the 64-bit seed, word w of block b belongs to token
4 b + w, u = (x + 0.5) 2^-32, Gumbel and addition in float64. Position is that of the row
read out. No batch, schedule or rank enters. Ties go to the lowest id, which is the one that
torch's argmax documents.

Evaluation may truncate the distribution. The order is the field's: temperature, then top-k,
then top-p over what top-k left, renormalised; what is dropped is -inf before the same noise is
added, so a token that survives wins by the same noise as without. The recorded log-probability
stays the one of the full softmax at that temperature (raw, not renormalised over the kept
tokens), so it is no log-probability of the distribution sampled from: training refuses it.
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
        top_k: sample among the k most likely tokens only (evaluation); 0: all of them.
        top_p: sample among the most likely tokens, as few as together have at least this
            probability (evaluation); 1: all of them.
        stop_ids: ids that end a text (the id is kept and trained).
        stop_strings: texts that end it; the token that completes one is the last one kept.
    """

    seed: int = 0
    temperature: float = 1.0
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if not is_word64(self.seed):
            raise ValueError(f"seed = {self.seed!r} must be an integer in 0..2^64-1")
        if not (0 < self.temperature < float("inf")):
            raise ValueError(f"temperature = {self.temperature!r} must be a finite number above 0 "
                             "(for the most likely token use greedy)")
        if not is_word64(self.top_k):
            raise ValueError(f"top_k = {self.top_k!r} must be an integer of at least 0; 0 keeps every token")
        if not (0 < self.top_p <= 1):
            raise ValueError(f"top_p = {self.top_p!r} must lie above 0 and not above 1; 1 keeps every token")
        if self.greedy and self.truncates:
            raise ValueError(f"top_k = {self.top_k}, top_p = {self.top_p} change nothing about the most likely "
                             "token: leave them out, or sample at a temperature above 0")
        wrong = next((i for i in self.stop_ids if not is_word64(i)), None)
        if wrong is not None:
            raise ValueError(f"stop_ids holds {wrong!r}; give token ids, integers of at least 0")
        if isinstance(self.stop_strings, str):
            raise ValueError(f"stop_strings = {self.stop_strings!r} must be a tuple of texts; a text "
                             "alone would stop at each of its characters")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings holds an empty text; remove it")

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return self.top_k > 0 or self.top_p < 1

    def describe(self) -> str:
        """How tokens are drawn and when a text ends, in one line for a person."""
        if self.greedy:
            drawn = "greedy (log-probs at temperature 1)"
        else:
            kept = ", ".join([f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p}"] * (self.top_p < 1))
            drawn = f"temperature {self.temperature}, " + (
                f"{kept} (log-probs of the full softmax)" if kept else "no top-k, no top-p")
        return (f"{drawn}, no penalties, seed {self.seed}, stop ids {list(self.stop_ids)}, stop strings "
                f"{list(self.stop_strings)}")


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


def truncated(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """scores [N, V] with -inf in place of what top-k, then top-p drop; the most likely one stays.

    Tokens are taken from the most likely down, equal ones from the lowest id up. top-k takes k of
    them (0: all). top-p takes the next one as long as those before it have less than top_p of the
    probability of what top-k left, in float64.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ordered[:, top_k:] = float("-inf")
    if top_p < 1:
        # On the CPU: CUDA's cumsum adds in no fixed order, and is refused with deterministic kernels.
        reached = torch.softmax(ordered.to(torch.float64), -1).cpu().cumsum(-1).to(scores.device)
        before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
        ordered = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(scores).scatter_(-1, ids, ordered)


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
        if sampling.truncates:
            scaled = truncated(scaled, sampling.top_k, sampling.top_p)
        noise = gumbel_noise(sampling.seed, uids, positions, logits.shape[-1], logits.device)
        ids = (scaled.to(torch.float64) + noise).argmax(-1)
    return ids, token_logprob(logits, ids, sampling.temperature).to(torch.float32)
