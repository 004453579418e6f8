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

    queries: int64 [G, Q] row of each padded query (a short span repeats its last row).
    pages: int64 [G, P] page ids (a short plane repeats its first page).
    mask: bool [G, 1, Q, P * page_size], True = attend.
    """

    queries: np.ndarray
    pages: np.ndarray
    mask: np.ndarray


def span_table(spans, slots) -> np.ndarray:
    """Spans (sequence, loop, start, stop) as int64 [spans, 4]: slot, loop, start, stop."""
    return np.array([(slots[s], loop, start, stop) for s, loop, start, stop in spans], dtype=np.int64)


def row_arrays(spans: np.ndarray) -> Rows:
    """Expand a span table to rows."""
    counts = spans[:, 3] - spans[:, 2]
    ends = np.cumsum(counts)
    position = np.arange(ends[-1]) - np.repeat(ends - counts - spans[:, 2], counts)
    return Rows(np.repeat(spans[:, 0], counts), np.repeat(spans[:, 1], counts), position)


def buckets(spans: np.ndarray) -> list[list[int]]:
    """Lines of a span table by group, in order: like query counts (1, 2-4, 5-16, 17-64, ...)
    and like key counts (1-64, 65-128, 129-256, ...).

    A group costs a handful of calls a layer, whatever its size, so few wide classes beat a
    tight fit: one more padded query row costs far less than a row of the linear layers.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for index, (_, _, start, stop) in enumerate(spans.tolist()):
        key = (((stop - start - 1).bit_length() + 1) // 2, ((stop - 1) // 64).bit_length())
        found.setdefault(key, []).append(index)
    return [found[key] for key in sorted(found)]


def attention_groups(spans: np.ndarray, table: np.ndarray,
                     page_size: int) -> tuple[list[Group], np.ndarray]:
    """The groups of a pass in order, and where their outputs lie.

    spans: a span table. table: int64 [slots, T, pages] page ids by plane.
    Returns also places: int64 [R], of each row of the pass in the [sum of G * Q] outputs of all
    groups, laid end to end.
    """
    counts = spans[:, 3] - spans[:, 2]
    first = np.cumsum(counts) - counts
    groups, places, base = [], np.empty(int(counts.sum()), dtype=np.int64), 0
    for members in buckets(spans):
        group = _group(spans[members], first[members], table, page_size)
        real = np.arange(group.queries.shape[1]) < counts[members][:, None]
        places[group.queries[real]] = base + np.flatnonzero(real)
        groups.append(group)
        base += group.queries.size
    return groups, places


def _group(spans: np.ndarray, first: np.ndarray, table: np.ndarray, page_size: int) -> Group:
    slot, loop, start, stop = spans.T
    count = stop - start
    plane_pages = -(-stop // page_size)
    width, most = int(count.max()), int(plane_pages.max())
    place = np.arange(width)
    local = np.minimum(place[None], count[:, None] - 1)
    queries = first[:, None] + local
    page = np.where(np.arange(most)[None] < plane_pages[:, None], np.arange(most)[None], 0)
    pages = table[slot[:, None], loop[:, None] - 1, page]
    mask = np.arange(most * page_size) <= (start[:, None] + local)[:, :, None]
    return Group(queries, pages, mask[:, None])
