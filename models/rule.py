"""The canonical shape rule: shapes in which a row's bits do not depend on its company.

Two clauses hold by construction, on any kernel that gives a row the same bits wherever it
stands in a call of one shape:

- keys: a query at position p attends over `key_length(p + 1)` keys, whatever the pass. Kernels
  split the sum over keys by its length, so the length must be a function of the position alone.
- blocks: no product and no attention call has more rows than the block in which rows agree.

The counts themselves are properties of kernel, dtype and CPU: `models/invariance.py` finds or
checks them. Masked keys must be finite (0 * NaN is NaN): the cache keeps free pages at zero.
Plain integers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Rule:
    """Counts under which rows were found to have the same bits.

    Attributes:
        rows: rows of a pass, and of a dense forward, are padded to a multiple of it.
        row_block: most rows of one product of the stack; a multiple of `rows`.
        head_rows, head_block: the same for the float32 head.
        queries: queries of one attention call are padded to a multiple of it.
        query_block: most queries of one attention call; a multiple of `queries`.
        length: longest sequence that was tried, in tokens; longer ones are refused.
    """

    rows: int
    row_block: int
    head_rows: int
    head_block: int
    queries: int
    query_block: int
    length: int

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ValueError(f"rule: {name} = {value!r} must be a positive integer")
        for count, block in (("rows", "row_block"), ("head_rows", "head_block"), ("queries", "query_block")):
            if getattr(self, block) % getattr(self, count):
                raise ValueError(f"rule: {block} = {getattr(self, block)} must be a multiple of {count} = "
                                 f"{getattr(self, count)}")


def key_length(count: int) -> int:
    """Keys that a query with `count` visible positions attends over: 64, 128, 192, 256, 384, 512,
    768, ...: steps of 64, twice as wide with each octave beyond 256."""
    step = 64
    while count > 4 * step:
        step *= 2
    return -(-count // step) * step


def key_lengths(count: int) -> list[int]:
    """All values of `key_length` for 1..count, rising."""
    found = [key_length(1)]
    while found[-1] < count:
        found.append(key_length(found[-1] + 1))
    return found


def pieces(start: int, stop: int, block: int) -> list[tuple[int, int, int]]:
    """Cut the positions start..stop-1 into attention calls: (start, stop, keys) with one key
    length and at most `block` positions each."""
    edges = [0, *key_lengths(stop)]
    found = []
    for low, high in pairwise(edges):
        for first in range(max(low, start), min(high, stop), block):
            found.append((first, min(first + block, high, stop), high))
    return found


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple

