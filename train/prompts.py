"""Which prompts a step trains on: a pure function of (data, data_seed, step).

There is no cursor to lose: position i of the endless stream is example order(epoch)[i mod n]
of epoch i div n. Knows no engine and no reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rollout.collect import Prompt, number_prompts
from rollout.data import Example, order


@dataclass(frozen=True)
class PromptStream:
    """An endless stream of prompts, reshuffled each epoch.

    Attributes:
        name: of the data set, part of every uid. data_digest: of the data set.
        prompts: (example, token ids), those that fit.
        seed: `data_seed`.
    """

    name: str
    data_digest: str
    prompts: tuple[tuple[Example, tuple[int, ...]], ...]
    seed: int

    @property
    def digest(self) -> str:
        """sha256 (hex) of the data set and of the token ids, which follow from tokenizer and chat template too."""
        total = hashlib.sha256(self.data_digest.encode())
        for _, ids in self.prompts:
            total.update(f"{ids}\n".encode())
        return total.hexdigest()

    def step(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of training step `step` (1, 2, ...), groups numbered from 0."""
        total = len(self.prompts)
        return number_prompts([
            self.prompts[_order(total, self.seed, place // total)[place % total]]
            for place in range((step - 1) * count, step * count)])

    def first(self, count: int | None) -> list[Prompt]:
        """The first `count` prompts in file order (None: all), for evaluation."""
        return number_prompts(self.prompts[:count])


@lru_cache(maxsize=4)
def _order(total: int, seed: int, epoch: int) -> Sequence[int]:
    return order(total, seed, epoch)
