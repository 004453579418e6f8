"""Paged keys and values: a page holds `page_size` positions of one loop plane, all layers.

A sequence that never goes deep never takes a deep page. The hidden state of a position
lies under the id of its loop-1 page, so it needs no table of its own. Which page a cell
got decides no bits, so page ids are not logged.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.plan import Capacity
from models.looped import LoopedLM


class PagedCache:
    """Storage and page tables for the active sequences of one engine.

    keys, values: [L, pages, page_size, K, D]; hidden: [pages * page_size, H]; all in the
    model dtype. table: int64 [max_sequences, T, most pages a plane], by slot.
    """

    def __init__(self, model: LoopedLM, capacity: Capacity):
        config = model.config
        self.page_size = capacity.page_size
        kind = {"dtype": model.dtype, "device": model.device}
        # Zero-filled, never empty: a masked key has weight 0, and 0 * NaN would be NaN.
        shape = (config.layers, capacity.pages, capacity.page_size, config.kv_heads, config.head_dim)
        try:
            self.keys, self.values = torch.zeros(shape, **kind), torch.zeros(shape, **kind)
            self.hidden = torch.zeros(capacity.pages * capacity.page_size, config.hidden, **kind)
        except RuntimeError as error:  # torch's words for no memory name a number of bytes and no setting
            raise ValueError(f"capacity: pages = {capacity.pages} of {capacity.page_size} positions do not fit into "
                             f"the memory of {model.device}; lower pages: {str(error).splitlines()[0]}") from None
        self.free_pages = list(range(capacity.pages - 1, -1, -1))
        self.free_slots = list(range(capacity.max_sequences - 1, -1, -1))
        plane_pages = min(capacity.pages, -(-config.max_positions // capacity.page_size))
        self.table = np.zeros((capacity.max_sequences, config.loops, plane_pages), dtype=np.int64)
        self.slots: dict[int, int] = {}
        self.held: dict[int, list[int]] = {}

    def admit(self, sequence: int) -> None:
        """Give the sequence a slot; it holds no page yet."""
        self.slots[sequence] = self.free_slots.pop()
        self.held[sequence] = [0] * self.table.shape[1]

    def release(self, sequence: int) -> None:
        """Take back slot and pages."""
        slot = self.slots.pop(sequence)
        for loop, count in enumerate(self.held.pop(sequence)):
            self.free_pages.extend(self.table[slot, loop, :count].tolist())
        self.free_slots.append(slot)

    def check_integrity(self) -> None:
        """AssertionError unless every page is either free or held once."""
        held = [page for sequence, slot in self.slots.items()
                for loop, count in enumerate(self.held[sequence])
                for page in self.table[slot, loop, :count].tolist()]
        if sorted([*self.free_pages, *held]) != list(range(self.keys.shape[1])):
            raise AssertionError(f"{len(held)} pages held and {len(self.free_pages)} free of "
                                 f"{self.keys.shape[1]}: some are lost or held twice")

    def extend(self, spans) -> None:
        """Take the pages that the spans write into; zero them, so that history leaves no bits."""
        fresh = []
        for sequence, loop, _, stop in spans:
            held, need = self.held[sequence], -(-stop // self.page_size)
            while held[loop - 1] < need:
                if not self.free_pages:
                    raise AssertionError("no free page although admission reserved the worst case")
                page = self.free_pages.pop()
                self.table[self.slots[sequence], loop - 1, held[loop - 1]] = page
                held[loop - 1] += 1
                fresh.append(page)
        if fresh:
            pages = torch.tensor(fresh, device=self.keys.device)
            self.keys.index_fill_(1, pages, 0)
            self.values.index_fill_(1, pages, 0)
