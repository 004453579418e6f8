"""The one log-probability function, used by sampler, replay and dense forward alike.

Other formulas (gather - logsumexp, log(softmax)) differ in the last bits for up to half of
all tokens, so no second one may exist.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprob(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at ids: logits [N, V] float32, ids [N] -> [N] float32.

    The temperature divides the logits, never the log-probability.
    """
    return torch.log_softmax(logits / temperature, -1).gather(-1, ids[:, None])[:, 0]


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), [N, V] -> [N]."""
    logp = torch.log_softmax(logits / temperature, -1)
    share = logp.exp()
    # A token of probability 0 counts 0, also where its log-probability is -inf.
    return -(share * logp.masked_fill(share == 0, 0.0)).sum(-1)
