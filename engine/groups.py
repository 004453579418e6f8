"""Rows of a pass and its attention groups, derived from spans and page tables alone.

Shapes decide bits, so this derivation has a version that the log names: replay groups as
the rollout did. Integers and numpy, no torch.

Without a shape rule a span is one attention call or part of one. Under a rule
(`models/rule.py`) a span is cut into pieces whose key length is a function of their positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.rule import Rule, padded, pieces

VERSION = 2


class Rows(NamedTuple):
    """Per-row integers, int64 [R]: sequence slot, loop (1-based), position."""

    slot: np.ndarray
    loop: np.ndarray
    position: np.ndarray


class Group(NamedTuple):
    """Pieces that share one attention call, padded to the same query and key counts.

    queries: int64 [G, Q] row of each padded query (a short piece repeats its last row).
    pages: int64 [G, P] page ids (a short plane repeats its first page).
    mask: bool [G, 1, Q, S], True = attend; S <= P * page_size.
    in_place: the S keys of piece i lie adjacent from its first page on, and the first pages of
    the pieces are equally far apart.
    """

    queries: np.ndarray
    pages: np.ndarray
    mask: np.ndarray
    in_place: bool


class Layout(NamedTuple):
    """How planes lie and how they may be read.

    table: int64 [slots, T, pages] page ids by plane. room: int64 [slots, T], positions of a plane
    that lie adjacent. page_size: positions of a page. rule: the shape rule, or None. in_place_from:
    keys, of all pieces of a group, from which another call costs less than a copy of them; None:
    nothing is read in place.
    """

    table: np.ndarray
    room: np.ndarray
    page_size: int
    rule: Rule | None = None
    in_place_from: int | None = None


def span_table(spans, slots) -> np.ndarray:
    """Spans (sequence, loop, start, stop) as int64 [spans, 4]: slot, loop, start, stop."""
    return np.array([(slots[s], loop, start, stop) for s, loop, start, stop in spans], dtype=np.int64)


def row_arrays(spans: np.ndarray) -> Rows:
    """Expand a span table to rows."""
    counts = spans[:, 3] - spans[:, 2]
    ends = np.cumsum(counts)
    position = np.arange(ends[-1]) - np.repeat(ends - counts - spans[:, 2], counts)
    return Rows(np.repeat(spans[:, 0], counts), np.repeat(spans[:, 1], counts), position)


def attention_groups(spans: np.ndarray, layout: Layout) -> tuple[list[Group], np.ndarray]:
    """The groups of a pass in order, and where their outputs lie.

    spans: a span table. Returns also places: int64 [R], of each row of the pass in the
    [sum of G * Q] outputs of all groups, laid end to end.
    """
    cut, keys, first = _pieces(spans, layout)
    groups, places, base = [], np.empty(int((cut[:, 3] - cut[:, 2]).sum()), dtype=np.int64), 0
    for members, in_place in buckets(cut, keys, layout):
        group = _group(cut[members], keys[members], first[members], layout, in_place)
        real = np.arange(group.queries.shape[1]) < (cut[members, 3] - cut[members, 2])[:, None]
        places[group.queries[real]] = base + np.flatnonzero(real)
        groups.append(group)
        base += group.queries.size
    return groups, places


def _pieces(spans: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans cut as the rule says: a span table, the keys of each piece, and its first row."""
    cut, keys = spans, -(-spans[:, 3] // layout.page_size) * layout.page_size
    if layout.rule is not None:
        found = [(slot, loop, low, high, count) for slot, loop, start, stop in spans.tolist()
                 for low, high, count in pieces(start, stop, layout.rule.query_block)]
        cut, keys = np.split(np.array(found, dtype=np.int64), [4], 1)
        keys = keys[:, 0]
    counts = cut[:, 3] - cut[:, 2]
    return cut, keys, np.cumsum(counts) - counts


def buckets(cut: np.ndarray, keys: np.ndarray, layout: Layout) -> list[tuple[list[int], bool]]:
    """Pieces by group, in order, and whether a group is read in place.

    Pieces of a class have like query counts (1, 2-4, 5-16, 17-64, ...) and like key counts (1-64,
    65-128, 129-256, ...; under a rule, equal ones). A class is one group where its planes lie
    adjacent and equally far apart; else those planes form such groups that are long or many, and the
    rest is gathered. A group costs a handful of calls a layer, whatever its size, so few wide classes beat a
    tight fit: one more padded query row costs far less than a row of the linear layers.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for index, (start, stop, length) in enumerate(zip(*cut[:, 2:].T.tolist(), keys.tolist(), strict=True)):
        kind = length if layout.rule is not None else ((stop - 1) // 64).bit_length()
        classes.setdefault((((stop - start - 1).bit_length() + 1) // 2, kind), []).append(index)
    found: list[tuple[list[int], bool]] = []
    for key in sorted(classes):
        members = classes[key]
        runs, rest = _runs(cut, keys, members, layout)
        if rest:
            found.append((rest, False))
        found += [(run, True) for run in runs]
    return found


def _runs(cut: np.ndarray, keys: np.ndarray, members: list[int], layout: Layout) -> tuple[list[list[int]], list[int]]:
    """Pieces of one class that are read in place, as groups of equal distance, and those that are gathered."""
    if layout.in_place_from is None:
        return [], members
    slot, loop = cut[members, 0], cut[members, 1] - 1
    most = int(keys[members].max())
    first, near = layout.table[slot, loop, 0].tolist(), (layout.room[slot, loop] >= most).tolist()
    # By address; pieces of one plane (blocks of a long span) have distance 0.
    order = sorted((page, index) for page, index, good in zip(first, members, near, strict=True) if good)
    runs: list[list[int]] = []
    step = None
    for at, (page, index) in enumerate(order):
        here = page - order[at - 1][0]
        if runs and (len(runs[-1]) == 1 or here == step):
            runs[-1].append(index)
            step = here
        else:
            runs.append([index])
    if len(runs) == 1 and all(near):
        return runs, []
    large = [run for run in runs if len(run) * most >= layout.in_place_from]
    chosen = {index for run in large for index in run}
    return large, [index for index in members if index not in chosen]


def _group(cut: np.ndarray, keys: np.ndarray, first: np.ndarray, layout: Layout, in_place: bool) -> Group:
    slot, loop, start, stop = cut.T
    count, size = stop - start, layout.page_size
    plane_pages = -(-stop // size)
    width, most = int(count.max()), int(keys.max())
    if layout.rule is not None:
        width = padded(width, layout.rule.queries)
    local = np.minimum(np.arange(width)[None], count[:, None] - 1)
    queries = first[:, None] + local
    index = np.arange(-(-most // size))[None]
    pages = layout.table[slot[:, None], loop[:, None] - 1, np.where(index < plane_pages[:, None], index, 0)]
    mask = np.arange(most) <= (start[:, None] + local)[:, :, None]
    return Group(queries, pages, mask[:, None], in_place)
