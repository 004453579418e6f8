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
from models.linear import pad_rows
from models.looped import LoopedLM
from models.rule import Rule, key_length, padded, pieces


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end as rows.

    Attributes:
        ids: int64 [R] tokens.
        positions: int64 [R] position of each row in its sequence.
        starts: first row of each sequence, plus R at the end.
        groups: per padded attention group (rows int64 [rows of the group], slots int64 of the
            same shape in a [G * S] buffer, G, S, longest length). Sequences of like length share a
            group, so padding at most doubles the work.
        rule: the shape rule that S obeys, or None.
    """

    ids: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    groups: tuple[tuple[Tensor, Tensor, int, int, int], ...]
    rule: Rule | None


def pack(sequences: Sequence[Sequence[int]], model: LoopedLM) -> Packed:
    """Pack token sequences (each non-empty). The layout depends on their lengths and the rule only."""
    device, rule = model.device, model.rule
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
        longest = max(lengths[i] for i in members)
        size = longest if rule is None else key_length(longest)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in members])
        slots = torch.cat([torch.arange(lengths[i]) + place * size
                           for place, i in enumerate(members)])
        groups.append((rows.to(device), slots.to(device), len(members), size, longest))
    ids = torch.tensor([token for s in sequences for token in s], dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Packed(ids.to(device), positions.to(device), tuple(starts), tuple(groups), rule)


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
    count, rule = packed.starts[-1], model.rule
    if rule is not None and highest >= rule.length:
        raise ValueError(f"a sequence has {highest + 1} tokens; numerics invariant were tried up to {rule.length}: "
                         "set them for a greater length")
    if packed.rule != rule:
        raise AssertionError(f"packed under the shape rule {packed.rule}, the model keeps {rule}")
    ids, positions = ((packed.ids, packed.positions) if rule is None else
                      (pad_rows(packed.ids, rule.rows), pad_rows(packed.positions, rule.rows)))
    cos, sin = model.rotary(positions, highest)
    more = len(ids) - count

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = _attend_packed(packed, q[:count], k[:count], v[:count], model)
        return torch.cat((mixed, mixed.new_zeros(more, *mixed.shape[1:]))) if more else mixed

    def one_loop(x: Tensor, own: Mapping[str, Tensor] | None) -> Tensor:
        return model.loop(x, cos, sin, attend, own)

    x = model.embed(ids, weights() if weights else None)
    states = []
    for _ in range(depth):
        own = weights() if weights else None
        if recompute:
            x = checkpoint(one_loop, x, own, use_reentrant=False, preserve_rng_state=False)
        else:
            x = one_loop(x, own)
        states.append(x[:count])
    return states


def _attend_packed(packed: Packed, q: Tensor, k: Tensor, v: Tensor, model: LoopedLM) -> Tensor:
    out = None
    for rows, slots, count, size, longest in packed.groups:
        whole = len(packed.groups) == 1

        def grouped(x: Tensor, rows=rows, slots=slots, count=count, size=size, whole=whole) -> Tensor:
            # Index copy into zeros: padding is finite and backward is a plain gather.
            buffer = x.new_zeros(count * size, *x.shape[1:])
            buffer = buffer.index_copy(0, slots, x if whole else x[rows])
            return buffer.view(count, size, *x.shape[1:]).transpose(1, 2)

        if model.rule is None:
            mixed = attention(grouped(q), grouped(k), grouped(v), None, model.kernel)
        else:
            mixed = _attend_by_rule(grouped(q), grouped(k), grouped(v), longest, model)
        mixed = mixed.transpose(1, 2).reshape(count * size, *q.shape[1:])[slots]
        if whole:
            return mixed
        out = torch.zeros_like(q) if out is None else out
        out = out.index_copy(0, rows, mixed)
    return out


def _attend_by_rule(q: Tensor, k: Tensor, v: Tensor, longest: int, model: LoopedLM) -> Tensor:
    """Causal attention [G, A, S, D] of the first `longest` positions, in the calls of the shape rule.

    Each call sees no more keys than its queries need, so this costs no more than a causal kernel.
    """
    rule, found = model.rule, []
    for start, stop, keys in pieces(0, longest, rule.query_block):
        place = torch.arange(start, start + padded(stop - start, rule.queries), device=q.device)
        place = place.clamp(max=stop - 1)
        mask = (torch.arange(keys, device=q.device) <= place[:, None])[None, None].expand(len(q), -1, -1, -1)
        mixed = attention(q[:, :, place], k[:, :, :keys], v[:, :, :keys], mask, model.kernel)
        found.append(mixed[:, :, :stop - start])
    rest = q.shape[2] - longest
    return torch.cat((*found, found[-1].new_zeros(*q.shape[:2], rest, q.shape[3])), 2)
