"""Running exit distribution of each sequence's newest position, float32.

The same recurrence as `models/exits.py`, one loop at a time, by cache slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plan import Capacity
from engine.schedule import Schedule


class GateState:
    """Remaining mass and CDF, float32 [max_sequences], for the schedule `exit:gate`."""

    def __init__(self, schedule: Schedule, capacity: Capacity, device: torch.device):
        self.schedule = schedule
        self.remaining = torch.ones(capacity.max_sequences, device=device)
        self.cdf = torch.zeros(capacity.max_sequences, device=device)

    def leaving(self, gate_logits: Tensor, slots: Sequence[int], loops: Sequence[int]) -> list[bool]:
        """Advance the distribution of each row by one loop; whether it leaves there.

        gate_logits: [N] after loop `loops[i]` of the newest position in slot `slots[i]`; a
        row at loop 1 starts afresh. A threshold >= 1 never leaves before `high`.
        """
        schedule = self.schedule
        slot = torch.tensor(slots, device=gate_logits.device)
        first = torch.tensor(loops, device=gate_logits.device) == 1
        remaining = torch.where(first, 1.0, self.remaining[slot])
        cdf = torch.where(first, 0.0, self.cdf[slot])
        gate = torch.sigmoid(gate_logits.to(torch.float32))
        cdf = cdf + gate * remaining
        self.cdf[slot] = cdf
        self.remaining[slot] = remaining * (1.0 - gate)
        reached = ((cdf >= schedule.threshold) & (schedule.threshold < 1)).tolist()
        return [loop >= schedule.high or (loop >= schedule.low and hit)
                for loop, hit in zip(loops, reached)]
