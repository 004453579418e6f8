"""Group-relative advantages of GRPO: plain float64 arithmetic, no torch.

Knows rewards and group keys only; it does not know tokens, masks or which rank holds a sample.
Give it every sample of the step, so that statistics never depend on how samples are spread.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

KINDS = ("group", "none", "leave-one-out")


@dataclass(frozen=True)
class Advantages:
    """Result for one batch of samples; the tuples are in the order of the rewards."""

    values: tuple[float, ...]  # advantage of each sample, float64; exactly 0.0 where unscored
    scored: tuple[bool, ...]  # False where the reward was None or NaN: leave the sample out of training
    groups: int  # groups with at least one scored sample
    unscored_groups: int  # groups without any; they enter no statistic
    zero_variance: float  # share of `groups` whose scored rewards are all equal (also those with one)
    within_group_std: float  # mean over `groups` of the sample standard deviation of rewards


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    advantage: str = "group",
    epsilon: float = 1e-6,
) -> Advantages:
    """What a sample's reward is beyond the scored rewards of its group.

    advantage: "group" is (reward - mean) / (std + epsilon), as in GRPO; "none" is reward - mean;
    "leave-one-out" is reward - mean of the *other* samples (RLOO), computed as n (reward - mean) / (n - 1).
    rewards: one a sample; None and NaN mean "unscored", 0.0 is a reward like any other.
    groups: the group key of each sample, for example (data set, example id); members need not be adjacent.

    The standard deviation is the *sample* one (n - 1), as in TRL, so [1, 0, 0, 0] has 0.5. A group
    whose scored rewards are all equal gets exactly 0.0: equality is tested on the rewards, because
    the mean of equal numbers need not equal them in floating point (0.1 three times does not).
    Sums are `math.fsum`, so the order of a group's members never matters.

    ValueError: lengths differ, unknown `normalise`, an infinite reward.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"rewards has {len(rewards)} entries and groups {len(groups)}: give one group key a reward")
    if advantage not in KINDS:
        raise ValueError(f"advantage is {advantage!r}: use one of {', '.join(KINDS)}")
    scored = tuple(reward is not None and not math.isnan(reward) for reward in rewards)
    members = _members(rewards, groups, scored)
    values = [0.0] * len(rewards)
    deviations: list[float] = []
    equal = 0
    for indices in members.values():
        if not indices:
            continue
        own = [float(rewards[index]) for index in indices]
        if all(reward == own[0] for reward in own):
            equal += 1
            deviations.append(0.0)
            continue
        mean = math.fsum(own) / len(own)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in own) / (len(own) - 1))
        deviations.append(std)
        for index, reward in zip(indices, own, strict=True):
            above = reward - mean
            if advantage == "group":
                above /= std + epsilon
            elif advantage == "leave-one-out":
                above = above * len(own) / (len(own) - 1)
            values[index] = above
    count = len(deviations)
    return Advantages(
        values=tuple(values),
        scored=scored,
        groups=count,
        unscored_groups=len(members) - count,
        zero_variance=equal / count if count else 0.0,
        within_group_std=math.fsum(deviations) / count if count else 0.0,
    )


def _members(
    rewards: Sequence[float | None], groups: Sequence[Hashable], scored: Sequence[bool]
) -> dict[Hashable, list[int]]:
    """Group key -> places of its scored rewards; empty where a group has none."""
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(groups):
        own = members.setdefault(key, [])
        if scored[index]:
            if math.isinf(rewards[index]):
                raise ValueError(f"rewards[{index}] is {rewards[index]}: return a finite number, or None if unscored")
            own.append(index)
    return members
