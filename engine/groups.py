"""Rows of a pass and its attention groups, derived from the spans alone.

Shapes decide bits, so this derivation has a version that the log names: replay groups as
the rollout did. Integers and numpy, no torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

VERSION = 1


class Rows(NamedTuple):
    """Per-row integers, int64 [R]: sequence slot, loop (1-based), position."""

    slot: np.ndarray
    loop: np.ndarray
    position: np.ndarray


class Group(NamedTuple):
    """Spans that share one attention call, padded to the same query and key counts.

    rows: int64 [real rows] in the pass. queries: int64 [G, Q] row of each padded query (a
    short span repeats its last row). real: int64 [real rows] places in the flat [G * Q]
    output. pages: int64 [G, P] page ids (a short plane repeats its first page).
    mask: bool [G, 1, Q, P * page_size], True = attend.
    """

    rows: np.ndarray
    queries: np.ndarray
    real: np.ndarray
    pages: np.ndarray
    mask: np.ndarray


def row_arrays(spans, slots) -> Rows:
    """Expand spans (sequence, loop, start, stop) to rows; slots: sequence -> slot."""
    table = np.array([(slots[s], loop, start, stop) for s, loop, start, stop in spans], dtype=np.int64)
    counts = table[:, 3] - table[:, 2]
    ends = np.cumsum(counts)
    position = np.arange(ends[-1]) - np.repeat(ends - counts - table[:, 2], counts)
    return Rows(np.repeat(table[:, 0], counts), np.repeat(table[:, 1], counts), position)


def buckets(spans, page_size: int) -> list[list[int]]:
    """Span indices by group: like query count and like key pages, each within a power of two.

    Padding therefore costs at most twice the queries and twice the keys.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for index, (_, _, start, stop) in enumerate(spans):
        pages = -(-stop // page_size)
        key = ((stop - start - 1).bit_length(), (pages - 1).bit_length())
        found.setdefault(key, []).append(index)
    return [found[key] for key in sorted(found)]


def attention_groups(spans, slots, table: np.ndarray, page_size: int) -> list[Group]:
    """The groups of a pass in order. table: int64 [slots, T, pages] page ids by plane."""
    counts = np.array([stop - start for _, _, start, stop in spans], dtype=np.int64)
    first = np.cumsum(counts) - counts
    return [_group([spans[i] for i in members], first[members], slots, table, page_size)
            for members in buckets(spans, page_size)]


def _group(spans, first: np.ndarray, slots, table: np.ndarray, page_size: int) -> Group:
    span = np.array([(slots[s], loop - 1, start, stop) for s, loop, start, stop in spans],
                    dtype=np.int64)
    count, stop = span[:, 3] - span[:, 2], span[:, 3]
    width, plane_pages = int(count.max()), -(-stop // page_size)
    most = int(plane_pages.max())
    place = np.arange(width)
    local = np.minimum(place[None], count[:, None] - 1)
    queries = first[:, None] + local
    positions = span[:, 2, None] + local
    is_real = place[None] < count[:, None]
    page = np.where(np.arange(most)[None] < plane_pages[:, None], np.arange(most)[None], 0)
    pages = table[span[:, 0, None], span[:, 1, None], page]
    mask = np.arange(most * page_size)[None, None] <= positions[:, :, None]
    return Group(queries[is_real], queries, np.flatnonzero(is_real), pages, mask[:, None])
