"""Executes passes: the only place where a schedule meets tensors.

Shape letters: R rows of a pass, G spans of a group, Q padded queries, S padded keys,
A query heads, K kv heads, D head_dim, H hidden, N read-outs, V vocabulary.

Rollout and replay call the same methods with the same integers; nothing here depends on
which of the two it is. No tensor call is made per row or per span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.groups import Group, Layout, attention_groups, row_arrays, span_table
from engine.kv import PagedCache
from engine.plan import Capacity, Span
from models.attention import additive, attention
from models.looped import LoopedLM
from models.rule import padded

# Elements of the keys of a group from which a call of its own, reading in place, is cheaper than a copy.
IN_PLACE_FROM = 2**15


class Runner:
    """A model, its cache, and the two operations of a pass: run spans, read rows out.

    keys_in_place, keys_gathered: keys that attention read where they lie, and as a copy (of one
    layer, padding included).
    """

    def __init__(self, model: LoopedLM, capacity: Capacity):
        self.model = model
        self.capacity = capacity
        self.version = model.version
        self.cache = PagedCache(model, capacity)
        # The eager kernel copies its operands anyway, and a GPU would wait for each call.
        # Pages must start on 64 bytes, as copies do: some kernels choose by alignment.
        width = model.config.kv_heads * model.config.head_dim
        aligned = capacity.page_size * width * model.dtype.itemsize % 64 == 0
        in_place = model.device.type == "cpu" and model.kernel == "sdpa" and aligned
        self.layout = Layout(self.cache.table, self.cache.room, capacity.page_size, model.rule,
                             -(-IN_PLACE_FROM // width) if in_place else None)
        self.keys_in_place = self.keys_gathered = 0

    def admit(self, sequence: int, positions: int) -> None:
        """Make room for a sequence of at most `positions` cells at a loop."""
        self.cache.admit(sequence, positions)

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        self.cache.release(sequence)

    @torch.no_grad()
    def run(self, spans: Sequence[Span], tokens: Sequence[int]) -> Tensor:
        """Run one pass; returns hidden states [R, H] of its real rows after their loop.

        tokens: input ids of the loop-1 rows, in row order. Writes KV cells and hidden states.
        """
        if self.model.version != self.version:
            raise RuntimeError(f"the cache holds cells of policy version {self.version}, the model "
                               f"is at {self.model.version}: build a new engine run")
        cache, size = self.cache, self.capacity.page_size
        cache.extend(spans)
        table = span_table(spans, cache.slots)
        rows = row_arrays(table)
        count = len(rows.position)
        page = rows.position // size
        offset = rows.position - page * size
        cell = self._tensor(cache.table[rows.slot, rows.loop - 1, page] * size + offset)
        home = self._tensor(cache.table[rows.slot, 0, page] * size + offset)
        x = self._inputs(rows.loop, home, tokens)
        more = padded(count, self.capacity.row_multiple) - count
        positions = self._tensor(rows.position)
        if more:
            x = torch.cat((x, x[-1:].expand(more, -1)))
            positions = torch.cat((positions, positions[-1:].expand(more)))
        cos, sin = self.model.rotary(positions, int(rows.position.max()))
        groups, places = attention_groups(table, self.layout)
        self._count_keys(groups)
        places = np.pad(places, (0, more), mode="edge")
        outputs = np.arange(sum(group.queries.size for group in groups))
        places = None if np.array_equal(places, outputs) else self._tensor(places)
        groups = [self._on_device(group, count) for group in groups]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v, cell, groups, places)

        x = self.model.loop(x, cos, sin, attend)[:count]
        cache.hidden.index_copy_(0, home, x)
        return x

    def _inputs(self, loops: np.ndarray, home: Tensor, tokens: Sequence[int]) -> Tensor:
        first = np.flatnonzero(loops == 1)
        if len(first) != len(tokens):
            raise AssertionError(f"{len(tokens)} input tokens for {len(first)} loop-1 rows")
        if len(first) == 0:
            return self.cache.hidden.index_select(0, home)
        embedded = self.model.embed(self._tensor(np.array(tokens)))
        if len(first) == len(loops):
            return embedded
        x = self.cache.hidden.index_select(0, home)
        return x.index_copy_(0, self._tensor(first), embedded)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cell: Tensor, groups,
                places: Tensor | None) -> Tensor:
        cache, real, found = self.cache, cell.shape[0], []
        keys, values = cache.keys[layer], cache.values[layer]
        keys.view(-1, *k.shape[1:]).index_copy_(0, cell, k[:real])
        values.view(-1, *v.shape[1:]).index_copy_(0, cell, v[:real])
        for queries, plane, mask in groups:
            shape = (mask.shape[0], mask.shape[2], *q.shape[1:])
            q_g = (q[:real] if queries is None else q.index_select(0, queries)).view(shape)
            k_g, v_g = (_plane(store, plane, mask.shape[-1]) for store in (keys, values))
            mixed = attention(q_g.transpose(1, 2), k_g, v_g, mask, self.model.kernel)
            found.append(mixed.transpose(1, 2).flatten(0, 1))
        found = found[0] if len(found) == 1 else torch.cat(found)
        return found if places is None else found.index_select(0, places)

    def _on_device(self, group: Group, rows: int) -> tuple[Tensor | None, Tensor | tuple, Tensor]:
        """Queries [G * Q] (None: all rows in order), the pages [G, P] or, for planes that are read in place,
        (first cell, distance in cells, G), and the additive mask [G, 1, Q, S]."""
        queries, first = group.queries.reshape(-1), group.pages[:, 0]
        every = len(queries) == rows and np.array_equal(queries, np.arange(rows))
        size = self.capacity.page_size
        plane = ((int(first[0]) * size, int(first[1] - first[0]) * size if len(first) > 1 else 0, len(first))
                 if group.in_place else self._tensor(group.pages))
        mask = additive(self._tensor(group.mask), self.model.dtype, self.model.kernel)
        return None if every else self._tensor(queries), plane, mask

    def _count_keys(self, groups: Sequence[Group]) -> None:
        for group in groups:
            count = group.mask.shape[0] * group.mask.shape[-1]
            if group.in_place:
                self.keys_in_place += count
            else:
                self.keys_gathered += count

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)

    @torch.no_grad()
    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] float32 of hidden states [N, H], N > 0."""
        count = hidden.shape[0]
        more = padded(count, self.capacity.head_multiple) - count
        if more:
            hidden = torch.cat((hidden, hidden[-1:].expand(more, -1)))
        return self.model.readout(hidden)[:count]


def _plane(store: Tensor, plane: Tensor | tuple[int, int, int], keys: int) -> Tensor:
    """Keys or values [G, K, S, D] out of one layer [pages, page_size, K, D].

    plane: (first cell, distance, G) of planes that are read where they lie, or pages [G, P], which
    are copied. Whole pages as rows: index_select copies each in one piece; indexing goes value by
    value and takes three times as long.
    """
    if isinstance(plane, tuple):
        first, distance, count = plane
        row, head, one = store.stride()[1:]
        return store.as_strided((count, store.shape[2], keys, store.shape[3]), (distance * row, head, row, one),
                                store.storage_offset() + first * row)
    found = store.flatten(1).index_select(0, plane.view(-1))
    found = found.view(plane.shape[0], -1, *store.shape[2:])[:, :keys]
    return found.contiguous().transpose(1, 2)  # no gaps where pages do not divide the keys: one alignment
