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

from engine.groups import Group, attention_groups, row_arrays
from engine.kv import PagedCache
from engine.plan import Capacity, Span, padded
from models.attention import attention
from models.looped import LoopedLM


class Runner:
    """A model, its cache, and the two operations of a pass: run spans, read rows out."""

    def __init__(self, model: LoopedLM, capacity: Capacity):
        self.model = model
        self.capacity = capacity
        self.version = model.version
        self.cache = PagedCache(model, capacity)

    def admit(self, sequence: int) -> None:
        """Make room for a sequence."""
        self.cache.admit(sequence)

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
        rows = row_arrays(spans, cache.slots)
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
        groups = [self._on_device(g) for g in
                  attention_groups(spans, cache.slots, cache.table, size)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v, cell, groups)

        x = self.model.loop(x, cos, sin, attend)[:count]
        cache.hidden[home] = x
        return x

    def _inputs(self, loops: np.ndarray, home: Tensor, tokens: Sequence[int]) -> Tensor:
        first = np.flatnonzero(loops == 1)
        if len(first) != len(tokens):
            raise AssertionError(f"{len(tokens)} input tokens for {len(first)} loop-1 rows")
        if len(first) == 0:
            return self.cache.hidden[home]
        embedded = self.model.embed(torch.tensor(tokens, device=home.device))
        if len(first) == len(loops):
            return embedded
        x = self.cache.hidden[home]
        x[self._tensor(first)] = embedded
        return x

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cell: Tensor, groups) -> Tensor:
        cache, real = self.cache, cell.shape[0]
        keys, values = cache.keys[layer], cache.values[layer]
        keys[cell], values[cell] = k[:real], v[:real]
        out = None
        for rows, queries, places, pages, mask in groups:
            spans, width = queries.shape
            k_g, v_g = (self._gather(store, pages) for store in (keys, values))
            whole = width == 1 and spans == q.shape[0]
            q_g = (q if whole else q[queries.view(-1)]).view(spans, width, *q.shape[1:])
            mixed = attention(q_g.transpose(1, 2), k_g, v_g, mask, self.model.kernel)
            mixed = mixed.transpose(1, 2).reshape(spans * width, *q.shape[1:])
            if whole:
                return mixed
            out = torch.zeros_like(q) if out is None else out
            out[rows] = mixed[places]
        return out

    def _gather(self, store: Tensor, pages: Tensor) -> Tensor:
        # [pages * size, K, D] -> [G, K, S, D]
        spans = pages.shape[0]
        size = self.capacity.page_size
        return store.view(-1, size, *store.shape[1:])[pages].view(
            spans, -1, *store.shape[1:]).transpose(1, 2)

    def _on_device(self, group: Group) -> tuple[Tensor, ...]:
        return tuple(self._tensor(a) for a in group)

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
