"""Rows and attention groups of a pass, against the spans cell by cell."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.groups import attention_groups, buckets, row_arrays, span_table


def test_rows_worked_by_hand():
    table = span_table([(7, 1, 2, 5), (4, 3, 0, 1)], {7: 1, 4: 0})
    assert table.tolist() == [[1, 1, 2, 5], [0, 3, 0, 1]]
    rows = row_arrays(table)
    assert rows.slot.tolist() == [1, 1, 1, 0]
    assert rows.loop.tolist() == [1, 1, 1, 3]
    assert rows.position.tolist() == [2, 3, 4, 0]


def test_one_group_worked_by_hand():
    """Pages of 2: a span of positions 2..3 and one of 0..2, padded to 3 queries and 2 pages."""
    table = np.arange(100, 124).reshape(2, 3, 4)
    spans = np.array([[1, 1, 2, 4], [0, 2, 0, 3]])
    [group], places = attention_groups(spans, table, 2)
    assert group.queries.tolist() == [[0, 1, 1], [2, 3, 4]]
    assert group.pages.tolist() == [[112, 113], [104, 105]]
    assert group.mask[:, 0].astype(int).tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]],
                                                     [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]
    assert places.tolist() == [0, 1, 3, 4, 5]


def test_a_short_plane_repeats_its_first_page_masked():
    table = np.arange(8).reshape(1, 1, 8)
    group = attention_groups(np.array([[0, 1, 0, 1], [0, 1, 6, 7]]), table, 2)[0][0]
    assert group.pages.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert group.mask[0, 0, 0].tolist() == [True] + [False] * 7
    assert group.mask[1, 0, 0].tolist() == [True] * 7 + [False]


def test_classes_of_queries_and_keys():
    widths = np.array([[0, 1, 64 - n, 64] for n in (17, 1, 4, 16, 2, 64, 5)])
    assert buckets(widths) == [[1], [2, 4], [3, 6], [0, 5]]
    ends = np.array([[0, 1, stop - 1, stop] for stop in (1, 64, 65, 128, 129, 256, 257)])
    assert buckets(ends) == [[0, 1], [2, 3], [4, 5], [6]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=9),
       st.integers(1, 20))
def test_every_row_attends_to_its_own_plane_up_to_its_position(parts, page_size):
    """Each row stands once among the outputs, and its unmasked keys are the cells 0..position of
    its slot and loop, in order."""
    table = np.random.default_rng(0).permutation(len(parts) * 3 * 230).reshape(len(parts), 3, 230)
    spans = np.array([(slot, loop, start, start + count) for slot, (loop, start, count) in enumerate(parts)])
    rows = row_arrays(spans)
    groups, places = attention_groups(spans, table, page_size)
    found = {}
    for group in groups:
        count, width = group.queries.shape
        assert group.mask.shape == (count, 1, width, group.pages.shape[1] * page_size)
        cells = group.pages[:, :, None] * page_size + np.arange(page_size)
        for line in range(count):
            for query in range(width):
                seen = cells[line].reshape(-1)[group.mask[line, 0, query]]
                found[len(found)] = (group.queries[line, query], seen)
    assert sorted({row for row, _ in found.values()}) == list(range(len(rows.position)))
    for row, place in enumerate(places):
        owner, seen = found[place]
        assert owner == row
        position = np.arange(rows.position[row] + 1)
        own = table[rows.slot[row], rows.loop[row] - 1, position // page_size] * page_size + position % page_size
        assert np.array_equal(seen, own)
    for row, seen in found.values():  # repeated queries see what the real row sees
        assert np.array_equal(seen, found[places[row]][1])
