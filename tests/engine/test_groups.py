"""Rows and attention groups of a pass, against the spans cell by cell."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.groups import Layout, attention_groups, buckets, row_arrays, span_table
from models.rule import Rule, key_length

RULE = Rule(rows=1, row_block=64, head_rows=1, head_block=64, queries=4, query_block=8, length=4096)


def scattered(table, page_size, **options) -> Layout:
    """Planes none of which lies adjacent."""
    return Layout(table, np.zeros(table.shape[:2], dtype=np.int64), page_size, **options)


def members(spans, layout):
    cut, keys = spans, -(-spans[:, 3] // layout.page_size) * layout.page_size
    return [found for found, _ in buckets(cut, keys, layout)]


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
    [group], places = attention_groups(spans, scattered(table, 2))
    assert group.queries.tolist() == [[0, 1, 1], [2, 3, 4]]
    assert group.pages.tolist() == [[112, 113], [104, 105]]
    assert group.mask[:, 0].astype(int).tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]],
                                                     [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]
    assert places.tolist() == [0, 1, 3, 4, 5]


def test_a_short_plane_repeats_its_first_page_masked():
    table = np.arange(8).reshape(1, 1, 8)
    group = attention_groups(np.array([[0, 1, 0, 1], [0, 1, 6, 7]]), scattered(table, 2))[0][0]
    assert group.pages.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert group.mask[0, 0, 0].tolist() == [True] + [False] * 7
    assert group.mask[1, 0, 0].tolist() == [True] * 7 + [False]


def test_classes_of_queries_and_keys():
    widths = np.array([[0, 1, 64 - n, 64] for n in (17, 1, 4, 16, 2, 64, 5)])
    layout = scattered(np.zeros((1, 1, 99), dtype=np.int64), 16)
    assert members(widths, layout) == [[1], [2, 4], [3, 6], [0, 5]]
    ends = np.array([[0, 1, stop - 1, stop] for stop in (1, 64, 65, 128, 129, 256, 257)])
    assert members(ends, layout) == [[0, 1], [2, 3], [4, 5], [6]]


def test_planes_that_are_read_in_place_worked_by_hand():
    """Planes at pages 0, 20, 40 and 70: groups of equal distance, by address. One is always worth it if it
    is the whole class, else from 160 keys in all; what lies too near its end is gathered."""
    table = np.array([0, 20, 40, 70])[:, None, None] + np.arange(20)
    layout = Layout(table, np.full((4, 1), 96), 16, in_place_from=160)

    def found(spans, layout=layout):
        return [(g.queries[:, 0].tolist(), g.in_place, g.mask.shape[-1]) for g in attention_groups(spans, layout)[0]]

    short, long = (np.array([[slot, 1, stop - 1, stop] for slot in (2, 0, 1, 3)]) for stop in (40, 80))
    assert found(short[:3]) == [([1, 2, 0], True, 48)]
    assert found(short) == [([0, 1, 2, 3], False, 48)]
    assert found(long) == [([3], False, 80), ([1, 2, 0], True, 80)]
    layout.room[2] = 64
    assert found(long) == [([0, 3], False, 80), ([1, 2], True, 80)]
    assert found(long, layout._replace(in_place_from=80)) == [([0], False, 80), ([1, 2], True, 80), ([3], True, 80)]
    assert found(long[:1]) == [([0], False, 80)] and found(long[1:2]) == [([0], True, 80)]
    assert found(long, layout._replace(in_place_from=None)) == [([0, 1, 2, 3], False, 80)]


def test_a_rule_cuts_spans_where_the_key_length_changes():
    """Positions 60..70 see 64 keys up to 63 and 128 from 64 on; blocks of 8 queries, padded to 4."""
    table = np.arange(40).reshape(1, 1, 40)
    groups, places = attention_groups(np.array([[0, 1, 60, 75], [0, 1, 3, 4]]), scattered(table, 16, rule=RULE))
    found = {(g.mask.shape[-1], tuple(map(tuple, g.queries.tolist()))) for g in groups}
    assert found == {(64, ((0, 1, 2, 3),)), (64, ((15, 15, 15, 15),)), (128, ((4, 5, 6, 7, 8, 9, 10, 11),)),
                     (128, ((12, 13, 14, 14),))}
    assert sorted(places.tolist()) == sorted(set(places.tolist())) and len(places) == 16


RULES = st.sampled_from([None, RULE, Rule(1, 1, 1, 1, 1, 64, 4096), Rule(1, 1, 1, 1, 16, 16, 4096)])


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=9),
       st.integers(1, 20), RULES, st.booleans())
def test_every_row_attends_to_its_own_plane_up_to_its_position(parts, page_size, rule, adjacent):
    """Each row stands once among the outputs, and its unmasked keys are the cells 0..position of
    its slot and loop, in order; under a rule the number of keys is a function of its position, and
    queries come in multiples and blocks."""
    table = np.random.default_rng(0).permutation(len(parts) * 3 * 230).reshape(len(parts), 3, 230)
    spans = np.array([(slot, loop, start, start + count) for slot, (loop, start, count) in enumerate(parts)])
    rows = row_arrays(spans)
    room = np.full(table.shape[:2], 230 * page_size)
    if adjacent:
        table = np.sort(table, -1) * 0 + np.arange(table.size).reshape(table.shape)
    layout = Layout(table, room, page_size, rule, 1) if adjacent else scattered(table, page_size, rule=rule)
    groups, places = attention_groups(spans, layout)
    found = {}
    for group in groups:
        count, width = group.queries.shape
        keys = group.mask.shape[-1]
        assert group.mask.shape[:3] == (count, 1, width)
        assert group.in_place == (adjacent and keys <= 230 * page_size), "in place where the plane has the room"
        assert group.pages.shape[1] == -(-keys // page_size)
        if rule is None:
            assert keys % page_size == 0
        else:
            assert width % rule.queries == 0 and width <= rule.query_block
            real = rows.position[group.queries]
            assert {key_length(position + 1) for position in real.ravel().tolist()} == {keys}
        cells = (group.pages[:, :, None] * page_size + np.arange(page_size)).reshape(count, -1)[:, :keys]
        if group.in_place:
            first = group.pages[:, 0] * page_size
            assert len({*np.diff(first).tolist()}) <= 1, "equally far apart"
            cells = first[:, None] + np.arange(keys)
        for line in range(count):
            for query in range(width):
                seen = cells[line][group.mask[line, 0, query]]
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
