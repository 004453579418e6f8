"""Running exit distribution of each sequence's newest position, float32.

The recurrence of `models/exits.py`, one loop at a time, by cache slot, with its bits: the same
probability, whatever rows share the call, and partial sums in float64, each rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.plan import Capacity
from engine.schedule import Schedule
from models.exits import exit_probability


class GateState:
    """Remaining mass (float32) and CDF before rounding (float64), [max_sequences], for the
    schedule `exit:gate`."""

    def __init__(self, schedule: Schedule, capacity: Capacity, device: torch.device):
        self.schedule = schedule
        self.remaining = torch.ones(capacity.max_sequences, device=device)
        self.cdf = torch.zeros(capacity.max_sequences, dtype=torch.float64, device=device)

    def leaving(self, gate_logits: Tensor, slots: Sequence[int], loops: Sequence[int]) -> list[bool]:
        """Advance the distribution of each row by one loop; whether it leaves there.

        gate_logits: [N] after loop `loops[i]` of the newest position in slot `slots[i]`; a
        row at loop 1 starts afresh. A threshold >= 1 never leaves before `high`.
        """
        schedule = self.schedule
        slot = torch.from_numpy(np.array(slots)).to(gate_logits.device)
        first = torch.from_numpy(np.array(loops) == 1).to(gate_logits.device)
        remaining = self.remaining[slot].masked_fill_(first, 1.0)
        cdf = self.cdf[slot].masked_fill_(first, 0.0)
        gate = exit_probability(gate_logits)
        cdf = cdf + gate * remaining
        self.cdf[slot] = cdf
        self.remaining[slot] = remaining * (1.0 - gate)
        reached = (cdf.to(torch.float32) >= schedule.threshold).tolist()
        early = schedule.threshold < 1
        return [loop >= schedule.high or (early and loop >= schedule.low and hit)
                for loop, hit in zip(loops, reached, strict=True)]
