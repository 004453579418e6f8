"""What one step of the engine executes and what the log records: the same objects.

Plain integers, no torch. Sequences are numbered by their place in the request list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Advance the frontier of `sequence` at `loop` (1-based) from `start` to `stop`."""

    sequence: int
    loop: int
    start: int
    stop: int


class Readout(NamedTuple):
    """Logits of one position from its hidden state after `loop`; `row` is its row in the pass."""

    row: int
    sequence: int
    position: int
    loop: int


class Pass(NamedTuple):
    """One execution of the shared stack.

    spans: in row order, which is the order of admission. padded_rows: rows of the matrix
    products, the spans' rows padded up to a multiple of `Capacity.row_multiple`.
    readouts: in row order. head_rows: the same for the head's matrix product (0 without
    read-outs).
    """

    spans: tuple[Span, ...]
    padded_rows: int
    readouts: tuple[Readout, ...]
    head_rows: int


class Admit(NamedTuple):
    """The sequence enters the engine with all frontiers at 0."""

    sequence: int


class Finish(NamedTuple):
    """The sequence has its last token; its pages are free."""

    sequence: int


Event = Admit | Pass | Finish


MOST_ROWS = 65535  # rows of a pass are logged in 16 bits


@dataclass(frozen=True)
class Capacity:
    """Sizes of one engine; configuration, never measured, because they decide shapes.

    Attributes:
        max_sequences: sequences in the engine at once.
        max_rows: rows of one pass, at least max_sequences so that every one advances.
        max_span: rows of one span (prompt chunk, catch-up burst).
        pages: KV pages in all; one holds `page_size` positions of one loop, all layers.
        page_size: positions of a page.
        row_multiple, head_multiple: row counts of the stack's and of the head's matrix
            products are padded up to a multiple of these.
    """

    max_sequences: int = 32
    max_rows: int = 256
    max_span: int = 64
    pages: int = 1024
    page_size: int = 16
    row_multiple: int = 1
    head_multiple: int = 1

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"capacity: {name} = {value!r} must be a positive integer")
            if value >= 2**31:
                raise ValueError(f"capacity: {name} = {value} must be below 2^31")
        if self.max_rows > MOST_ROWS:
            raise ValueError(f"capacity: max_rows = {self.max_rows} is above {MOST_ROWS}, the most that a "
                             "schedule log counts in one pass")
        if self.max_rows < self.max_sequences:
            raise ValueError(f"capacity: max_rows = {self.max_rows} is below max_sequences = "
                             f"{self.max_sequences}; every sequence needs a row in each pass")

    def sequence_pages(self, positions: int, loops: int) -> int:
        """Pages that `positions` cells at each of `loops` loops take."""
        return loops * -(-positions // self.page_size)

