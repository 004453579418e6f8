"""The dense forward: every token through loops 1..depth, packed rows, with or without a graph.

Shape letters: R packed rows of all sequences, G sequences of one padded group, S its padded
length, H hidden. Built from the model's own verbs; knows no cache and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.attention import attention
from models.looped import LoopedLM


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end as rows.

    Attributes:
        ids: int64 [R] tokens.
        positions: int64 [R] position of each row in its sequence.
        starts: first row of each sequence, plus R at the end.
        groups: per padded attention group (rows int64 [rows of the group], slots int64 of the
            same shape in a [G * S] buffer, G, S). Sequences of like length share a group, so
            padding at most doubles the work.
    """

    ids: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    groups: tuple[tuple[Tensor, Tensor, int, int], ...]


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Pack token sequences (each non-empty). The layout depends on their lengths only."""
    lengths = [len(s) for s in sequences]
    if not lengths or min(lengths) < 1:
        raise ValueError("sequences: at least one is needed and none may be empty")
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        buckets.setdefault(1 << (length - 1).bit_length(), []).append(index)
    groups = []
    for bucket in sorted(buckets):
        members = buckets[bucket]
        size = max(lengths[i] for i in members)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in members])
        slots = torch.cat([torch.arange(lengths[i]) + place * size
                           for place, i in enumerate(members)])
        groups.append((rows.to(device), slots.to(device), len(members), size))
    ids = torch.tensor([token for s in sequences for token in s], dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Packed(ids.to(device), positions.to(device), tuple(starts), tuple(groups))


def dense_forward(model: LoopedLM, packed: Packed, depth: int, *,
                  weights: Callable[[], Mapping[str, Tensor]] | None = None,
                  recompute: bool = False) -> list[Tensor]:
    """Hidden states after loops 1..depth, each [R, H], of packed sequences.

    depth: 1..T.
    weights: called once for the embedding and once for each loop, in that order, with or
        without recomputation; gives the tensors that the graph leads to (None: the compute
        copy, no graph unless its tensors require one). A call per loop lets the gradient of a
        shared weight be summed over loops in float32.
    recompute: keep only the states between loops and run each loop again in backward; the
        gradient's bits are the same.
    Errors: ValueError for a depth outside 1..T or a sequence beyond max_positions.
    """
    if not 1 <= depth <= model.config.loops:
        raise ValueError(f"depth = {depth} must be in 1..{model.config.loops}, the model's loops")
    highest = max(stop - start for start, stop in pairwise(packed.starts)) - 1
    if highest >= model.config.max_positions:
        raise ValueError(f"a sequence has {highest + 1} tokens, more than max_positions = "
                         f"{model.config.max_positions} of the model")
    cos, sin = model.rotary(packed.positions, highest)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend_packed(packed, q, k, v, model.kernel)

    def one_loop(x: Tensor, own: Mapping[str, Tensor] | None) -> Tensor:
        return model.loop(x, cos, sin, attend, own)

    x = model.embed(packed.ids, weights() if weights else None)
    states = []
    for _ in range(depth):
        own = weights() if weights else None
        if recompute:
            x = checkpoint(one_loop, x, own, use_reentrant=False, preserve_rng_state=False)
        else:
            x = one_loop(x, own)
        states.append(x)
    return states


def _attend_packed(packed: Packed, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    out = None
    for rows, slots, count, size in packed.groups:
        whole = len(packed.groups) == 1

        def padded(x: Tensor, rows=rows, slots=slots, count=count, size=size, whole=whole) -> Tensor:
            # Index copy into zeros: padding is finite and backward is a plain gather.
            buffer = x.new_zeros(count * size, *x.shape[1:])
            buffer = buffer.index_copy(0, slots, x if whole else x[rows])
            return buffer.view(count, size, *x.shape[1:]).transpose(1, 2)

        mixed = attention(padded(q), padded(k), padded(v), None, kernel)
        mixed = mixed.transpose(1, 2).reshape(count * size, *q.shape[1:])[slots]
        if whole:
            return mixed
        out = torch.zeros_like(q) if out is None else out
        out = out.index_copy(0, rows, mixed)
    return out
