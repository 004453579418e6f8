"""The GRPO loss: a pure function of packed 1-D tensors, one entry a trained token.

Only trained tokens come in (select them, never multiply by a mask: 0 * NaN is NaN), and weights
and denominator are known before backward. So every token's gradient is the same whatever
micro-batch, cohort or process it sits in. Knows no model, no samples and no process.

| denominator | a token weighs | divided by | in the field |
|---|---|---|---|
| `tokens` | 1 | trained tokens of the update | token-mean (DAPO) |
| `sequences` | 1 / trained tokens of its sequence | sequences with a trained token | seq-mean-token-mean (GRPO) |
| a number | 1 | the number | token-sum over a constant (Dr. GRPO) |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossMetrics:
    """Sums over the tokens of one call, in float64; `a + b` is the record of both calls together."""

    tokens: int  # trained tokens
    loss: float  # the returned loss, already divided by the global denominator: contributions add up
    ratio_sum: float  # of exp(logp - old_logp)
    ratio_min: float  # +inf without tokens
    ratio_max: float  # -inf without tokens
    ratio_changed: int  # tokens whose logp differs from old_logp: a ratio that is not exactly 1
    clipped_low: int  # tokens without policy gradient because ratio < 1 - clip_low and advantage < 0
    clipped_high: int  # the same with ratio > 1 + clip_high and advantage > 0
    kl_sum: float  # of the k3 estimate, nats; 0.0 without a reference

    def __add__(self, other: LossMetrics) -> LossMetrics:
        return LossMetrics(
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_min=min(self.ratio_min, other.ratio_min),
            ratio_max=max(self.ratio_max, other.ratio_max),
            ratio_changed=self.ratio_changed + other.ratio_changed,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def summary(self) -> dict[str, float]:
        """Means and shares for the metrics file; NaN for what no token defines."""
        count = self.tokens or float("nan")
        return {
            "loss": self.loss,
            "ratio_mean": self.ratio_sum / count,
            "ratio_min": self.ratio_min if self.tokens else count,
            "ratio_max": self.ratio_max if self.tokens else count,
            "ratio_not_one": self.ratio_changed / count,
            "clip_fraction_low": self.clipped_low / count,
            "clip_fraction_high": self.clipped_high / count,
            "kl": self.kl_sum / count,
        }


NO_TOKENS = LossMetrics(0, 0.0, 0.0, float("inf"), float("-inf"), 0, 0, 0, 0.0)


def usable(logp: Tensor) -> Tensor:
    """Mask [N] of tokens whose recorded (or reference) log-prob [N] is finite.

    Drop the others from the trained tokens *before* the denominator is counted, and report how
    many there were: a token outside the numerator must not stay in the denominator.
    """
    return torch.isfinite(logp)


def weigh(chosen: Tensor, starts: Sequence[int], denominator: str | float) -> tuple[Tensor, int]:
    """Weight of each token and what these tokens add to the denominator of the update.

    chosen: bool [N], trained tokens, sequence after sequence. starts: first token of each sequence, then N.
    denominator: "tokens", "sequences" or a number (the table above); the number is not added to.

    Returned: float64 [N], 0 where not chosen, and a count. The counts of all cohorts and processes add up to
    the denominator; a sequence without a trained token weighs nothing and is not counted.
    """
    trained = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))[torch.tensor(starts)].diff()
    if denominator != "sequences":
        return chosen.to(torch.float64), int(trained.sum())
    each = (1 / trained.clamp(min=1).to(torch.float64)).repeat_interleave(torch.tensor(starts).diff())
    return torch.where(chosen, each, 0.0), int((trained > 0).sum())


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    weights: Tensor | None = None,
    reference_logp: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> tuple[Tensor, LossMetrics]:
    """Clipped policy-gradient loss with an optional k3 penalty, and its metrics.

    logp [N]: log-probs under the weights in training; carries the graph.
    old_logp [N]: recorded at rollout, finite (see `usable`); reference_logp [N]: frozen reference.
    advantages [N]: one a token.
    denominator: of the whole update over all cohorts and processes (see `weigh`), or a configured
    constant; the same in every call of that update. weights [N]: what a token's cost counts; None: 1.

    loss = sum(weight * (max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high)) + kl_coefficient * k3))
    / denominator, with ratio = exp(logp - old_logp), k3 = exp(d) - d - 1, d = reference_logp - logp.

    Returned: the loss, a float64 scalar (arithmetic is float64 inside; the gradient of a float32
    logp is rounded once, token by token), and `LossMetrics`. Without tokens the loss is 0 and still
    has a graph. A token with advantage 0 has a policy gradient of exactly 0, also where its ratio
    overflows; it still receives the k3 gradient, and so do groups of equal rewards.
    """
    others = (old_logp, advantages) if reference_logp is None else (old_logp, advantages, reference_logp)
    for other in others:
        assert logp.dim() == 1 and other.shape == logp.shape, f"packed 1-D expected: {logp.shape}, {other.shape}"
    if logp.numel() == 0:
        return logp.double().sum(), NO_TOKENS
    if not 0 < denominator < float("inf"):
        raise ValueError(f"denominator is {denominator}: give the number of trained tokens or a positive constant")
    log_ratio = logp.double() - old_logp.detach().double()
    advantages = advantages.detach().double()
    with torch.no_grad():
        ratio = log_ratio.exp()
        high = (advantages > 0) & (ratio > 1 + clip_high)
        low = (advantages < 0) & (ratio < 1 - clip_low)
        live = (advantages != 0) & ~high & ~low
        # What a token contributes when its gradient is cut: finite whatever the ratio is.
        constant = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    # Two selections: the inner one keeps an infinite exp, whose backward is 0 * inf, out of the graph.
    policy = torch.where(live, -advantages * torch.where(live, log_ratio, 0.0).exp(), constant)
    cost, kl = policy, torch.zeros_like(policy)
    if reference_logp is not None:
        difference = reference_logp.detach().double() - logp.double()
        kl = torch.expm1(difference) - difference
        if kl_coefficient != 0.0:
            cost = cost + kl_coefficient * kl
    loss = (cost if weights is None else weights * cost).sum() / denominator
    changed = (log_ratio != 0).sum()
    # One transfer to the host for all metrics.
    rows = [loss, ratio.sum(), ratio.min(), ratio.max(), changed, low.sum(), high.sum(), kl.sum()]
    numbers = torch.stack(rows).detach().tolist()
    counts = [int(number) for number in numbers[4:7]]
    return loss, LossMetrics(logp.numel(), *numbers[:4], *counts, numbers[7])
