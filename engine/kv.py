"""Paged keys and values: a page holds `page_size` positions of one loop plane, all layers.

A sequence that never goes deep never takes a deep page. The hidden state of a position
lies under the id of its loop-1 page, so it needs no table of its own.

A plane (sequence, loop) claims adjacent pages when it takes its first one, as many as it can
ever need, so that attention may read it in place. A claim is a preference: other planes take
claimed pages when nothing else is free, and what is no longer adjacent is gathered. Pages
follow from the order of events alone; replay places its cells as the rollout did.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.plan import Capacity
from models.looped import LoopedLM
from models.rule import key_length

NOBODY = -1


class PagedCache:
    """Storage and page tables for the active sequences of one engine.

    keys, values: [L, pages, page_size, K, D]; hidden: [pages * page_size, H]; all in the
    model dtype. table: int64 [max_sequences, T, most pages a plane], by slot. room: int64
    [max_sequences, T], positions from the plane's first page on that lie adjacent and are its own.
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
        self.longest: Callable[[int], int] = key_length if model.rule is not None else int  # keys that attention reads
        self.free = np.ones(capacity.pages, dtype=bool)
        self.owner = np.full(capacity.pages, NOBODY)  # plane that claims a page: slot * T + loop - 1
        self.free_slots = list(range(capacity.max_sequences - 1, -1, -1))
        plane_pages = min(capacity.pages, -(-config.max_positions // capacity.page_size))
        self.table = np.zeros((capacity.max_sequences, config.loops, plane_pages), dtype=np.int64)
        self.room = np.zeros((capacity.max_sequences, config.loops), dtype=np.int64)
        self.slots: dict[int, int] = {}
        self.held: dict[int, list[int]] = {}
        self.limit: dict[int, int] = {}

    def admit(self, sequence: int, positions: int) -> None:
        """Give the sequence a slot; it holds no page yet and will never have more cells at a loop."""
        self.slots[sequence] = self.free_slots.pop()
        self.held[sequence] = [0] * self.table.shape[1]
        self.limit[sequence] = positions

    def release(self, sequence: int) -> None:
        """Take back slot, pages and claims."""
        slot, loops = self.slots.pop(sequence), self.table.shape[1]
        for loop, count in enumerate(self.held.pop(sequence)):
            self.free[self.table[slot, loop, :count]] = True
        self.owner[self.owner // loops == slot] = NOBODY
        self.room[slot] = 0
        self.free_slots.append(slot)
        del self.limit[sequence]

    def check_integrity(self) -> None:
        """AssertionError unless every page is either free or held once, and claims are adjacent and whole."""
        held = [page for sequence, slot in self.slots.items()
                for loop, count in enumerate(self.held[sequence])
                for page in self.table[slot, loop, :count].tolist()]
        if sorted([*np.flatnonzero(self.free), *held]) != list(range(len(self.free))):
            raise AssertionError(f"{len(held)} pages held and {int(self.free.sum())} free of "
                                 f"{len(self.free)}: some are lost or held twice")
        for sequence, slot in self.slots.items():
            for loop, count in enumerate(self.held[sequence]):
                claimed = np.flatnonzero(self.owner == slot * self.table.shape[1] + loop)
                pages = self.table[slot, loop, :min(count, len(claimed))]
                if len(claimed) * self.page_size != self.room[slot, loop] or (
                        len(claimed) and (claimed[-1] - claimed[0] >= len(claimed)
                                          or not np.array_equal(pages, claimed[:len(pages)]))):
                    raise AssertionError(f"sequence {sequence}, loop {loop + 1}: its claim is not what it holds")

    def extend(self, spans) -> None:
        """Take the pages that the spans write into. A page is zeroed by the first plane that takes or
        claims it, so that history leaves no bits and what lies behind a plane is finite."""
        fresh: list[int] = []
        for sequence, loop, _, stop in spans:
            held, need = self.held[sequence], -(-stop // self.page_size)
            if held[loop - 1] < need:
                fresh += self._take(self.slots[sequence], loop - 1, held[loop - 1], need, self.limit[sequence])
                held[loop - 1] = need
        if fresh:
            pages = torch.tensor(fresh, device=self.keys.device)
            self.keys.index_fill_(1, pages, 0)
            self.values.index_fill_(1, pages, 0)

    def _take(self, slot: int, loop: int, count: int, need: int, limit: int) -> list[int]:
        """Give a plane its pages `count`..`need`-1; the pages that nobody has zeroed for it yet."""
        fresh = self._claim(slot, loop, max(limit, need)) if count == 0 else []
        for index in range(count, need):
            if index * self.page_size < self.room[slot, loop]:
                page = int(self.table[slot, loop, 0]) + index if index else fresh[0]
            else:
                page = self._stray()
                fresh.append(page)
            self.free[page] = False
            self.table[slot, loop, index] = page
        return fresh

    def _claim(self, slot: int, loop: int, limit: int) -> list[int]:
        """Adjacent pages for a plane of up to `limit` positions, at the lowest place; [] where none are."""
        taken = np.flatnonzero(~self.free | (self.owner != NOBODY))
        starts = np.concatenate(([0], taken + 1))
        gaps = np.concatenate((taken, [len(self.free)])) - starts
        for positions in (self.longest(limit), limit):
            count = -(-positions // self.page_size)
            fitting = np.flatnonzero(gaps >= count)
            if len(fitting):
                first = int(starts[fitting[0]])
                self.owner[first:first + count] = slot * self.table.shape[1] + loop
                self.room[slot, loop] = count * self.page_size
                return list(range(first, first + count))
        return []

    def _stray(self) -> int:
        """The lowest free page, one that nobody claims if there is one; else a claim ends before it."""
        free = np.flatnonzero(self.free)
        if not len(free):
            raise AssertionError("no free page although admission reserved the worst case")
        unclaimed = free[self.owner[free] == NOBODY]
        if len(unclaimed):
            return int(unclaimed[0])
        page = int(free[-1])  # the end of a claim is the part that is needed last
        plane = self.owner[page]
        claimed = np.flatnonzero(self.owner == plane)
        self.owner[page:claimed[-1] + 1] = NOBODY
        slot, loop = divmod(int(plane), self.table.shape[1])
        self.room[slot, loop] = (page - claimed[0]) * self.page_size
        return page
