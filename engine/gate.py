"""Running exit distribution of each sequence's newest position, float32.

The recurrence of `models/exits.py`, one loop at a time, by cache slot, with its bits: the same
probability, whatever rows share the call, and partial sums in float64, each rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.plan import Capacity
from engine.schedule import Schedule
from models.exits import exit_probability


class GateState:
    """Remaining mass (float32) and CDF before rounding (float64), [max_sequences], for the
    schedule `exit:gate`. On the host, where the decision is needed, and in numpy, whose calls on few
    numbers take a fraction of torch's time; sums and products have one correct rounding everywhere."""

    def __init__(self, schedule: Schedule, capacity: Capacity):
        self.schedule = schedule
        self.remaining = np.ones(capacity.max_sequences, dtype=np.float32)
        self.cdf = np.zeros(capacity.max_sequences, dtype=np.float64)

    def leaving(self, gate_logits: Tensor, slots: Sequence[int], loops: Sequence[int]) -> list[bool]:
        """Advance the distribution of each row by one loop; whether it leaves there.

        gate_logits: [N] after loop `loops[i]` of the newest position in slot `slots[i]`; a
        row at loop 1 starts afresh. A threshold >= 1 never leaves before `high`.
        """
        schedule, slot = self.schedule, np.array(slots)
        gate = exit_probability(gate_logits).cpu().numpy()
        first = np.array(loops) == 1
        remaining = np.where(first, np.float32(1), self.remaining[slot])
        self.cdf[slot] = cdf = np.where(first, 0.0, self.cdf[slot]) + gate * remaining
        self.remaining[slot] = remaining * (np.float32(1) - gate)
        # As torch compares a float32 tensor with a number: the number is rounded to float32.
        reached = (cdf.astype(np.float32) >= np.float32(schedule.threshold)).tolist()
        early = schedule.threshold < 1
        return [loop >= schedule.high or (early and loop >= schedule.low and hit)
                for loop, hit in zip(loops, reached, strict=True)]
