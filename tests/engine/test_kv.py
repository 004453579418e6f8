"""Pages and claims of the cache, on generated orders of events."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from engine import Capacity
from engine.kv import PagedCache

MODEL = tiny_model()  # 3 loops, 64 positions


def cache(pages=20, page_size=4, sequences=3):
    return PagedCache(MODEL, Capacity(max_sequences=sequences, max_rows=64, pages=pages, page_size=page_size))


def test_planes_claim_adjacent_pages_worked_by_hand():
    """Two sequences of 10 and 6 cells in pages of 4: claims of 3 and 2 pages in order of first use."""
    found = cache()
    found.admit(7, 10)
    found.admit(8, 6)
    found.extend([(7, 1, 0, 2), (8, 1, 0, 5), (7, 2, 0, 1)])
    a, b = found.slots[7], found.slots[8]
    assert found.table[a, 0, 0] == 0 and found.table[b, 0, :2].tolist() == [3, 4] and found.table[a, 1, 0] == 5
    assert found.room[a].tolist() == [12, 12, 0] and found.room[b].tolist() == [8, 0, 0]
    found.extend([(7, 1, 2, 10)])
    assert found.table[a, 0, :3].tolist() == [0, 1, 2]
    found.check_integrity()
    found.release(7)
    found.admit(9, 4)
    found.extend([(9, 1, 0, 4)])
    assert found.table[found.slots[9], 0, 0] == 0


def test_without_room_for_a_claim_planes_take_what_is_free():
    """5 pages: one claim of 3; the second plane of 3 finds no gap, takes the unclaimed pages, and then
    the end of the first one's claim, which is no longer all adjacent."""
    found = cache(pages=5)
    found.admit(0, 12)
    found.admit(1, 12)
    found.extend([(0, 1, 0, 1), (1, 1, 0, 12)])
    a, b = found.slots[0], found.slots[1]
    assert found.table[b, 0, :3].tolist() == [3, 4, 2]
    assert found.room[a, 0] == 8 and found.room[b, 0] == 0
    found.check_integrity()
    with pytest.raises(AssertionError, match="no free page"):
        found.extend([(0, 1, 1, 12)])


def test_what_a_plane_takes_or_claims_is_zero():
    found = cache()
    found.keys.fill_(float("nan"))
    found.values.fill_(float("nan"))
    found.admit(0, 10)
    found.extend([(0, 1, 0, 1)])
    assert not found.keys[:, :3].any() and not found.values[:, :3].any()
    assert found.keys[:, 3:].isnan().all()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 9)), max_size=40),
       st.integers(12, 60), st.integers(1, 5))
def test_any_order_of_events_keeps_pages_whole(actions, pages, page_size):
    """No page belongs to two planes, adjacent cells are the plane's own, and the same events give
    the same pages."""
    tables = []
    for _ in range(2):
        found, ends, limits = cache(pages, page_size), {}, {}
        for sequence, loop, more in actions:
            if sequence in found.slots and more == 9:
                found.release(sequence)
                ends = {key: value for key, value in ends.items() if key[0] != sequence}
            elif sequence not in found.slots and len(found.slots) < 3:
                limits[sequence] = 1 + more
                found.admit(sequence, limits[sequence])
            elif sequence in found.slots:
                start = ends.get((sequence, loop), 0)
                stop = min(start + more, limits[sequence])
                need = -(-stop // page_size) - -(-start // page_size)
                if stop > start and need <= found.free.sum():
                    found.extend([(sequence, loop, start, stop)])
                    ends[sequence, loop] = stop
            found.check_integrity()
            for number, slot in found.slots.items():
                for index in range(3):
                    held = found.table[slot, index, :found.held[number][index]]
                    room = found.room[slot, index] // page_size
                    assert np.array_equal(held[:room], held[:1] + np.arange(len(held[:room])))
        tables.append((found.table.copy(), found.room.copy()))
    assert all(np.array_equal(*pair) for pair in zip(*tables, strict=True))
