import math

import pytest
import torch

from train.reduction import block_squares, squared_norm, tree_sum


def leaves(count, size=257):
    generator = torch.Generator().manual_seed(count)
    scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return scale * torch.randn(count, size, generator=generator)


def reference(rows):
    """The tree as the design words it."""
    if len(rows) == 1:
        return rows[0]
    middle = math.ceil(len(rows) / 2)
    return reference(rows[:middle]) + reference(rows[middle:])


@pytest.mark.parametrize("count", range(1, 10))
def test_same_bits_as_the_recursive_reference(count):
    rows = leaves(count)
    assert torch.equal(tree_sum(lambda index: rows[index].clone(), count), reference(rows))


def test_five_leaves_by_hand():
    """((a + b) + c) + (d + e): 2^24 + 1 rounds to 2^24 in float32, so the grouping shows."""
    big = 2.0**24
    values = [big, 1.0, 1.0, 1.0, 1.0]
    assert tree_sum(lambda index: torch.tensor([values[index]]), 5).item() == big + 2
    values = [1.0, 1.0, big, 1.0, 1.0]
    assert tree_sum(lambda index: torch.tensor([values[index]]), 5).item() == big + 4


def test_a_sequential_sum_differs():
    rows = leaves(9)
    sequential = rows[0].clone()
    for row in rows[1:]:
        sequential += row
    assert not torch.equal(tree_sum(lambda index: rows[index].clone(), 9), sequential)


def test_subtrees_summed_apart_give_the_same_bits():
    """Eight leaves on two owners of four: the root adds two complete subtrees."""
    rows = leaves(8)
    halves = [tree_sum(lambda index, first=first: rows[first + index].clone(), 4) for first in (0, 4)]
    assert torch.equal(tree_sum(lambda index: halves[index].clone(), 2), reference(rows))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 32])
def test_leaves_come_once_in_order_and_few_live_at_a_time(count):
    """Storages are counted through weak references: a leaf that was added must be free."""
    import weakref

    alive, seen, peak = weakref.WeakSet(), [], 0

    def leaf(index):
        nonlocal peak
        seen.append(index)
        tensor = torch.ones(3)
        alive.add(tensor)
        peak = max(peak, len(alive))
        return tensor

    assert tree_sum(leaf, count).tolist() == [float(count)] * 3
    assert seen == list(range(count))
    assert peak <= math.ceil(math.log2(count)) + 1


def test_broken_leaves_are_named():
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        tree_sum(lambda index: shared, 2)
    with pytest.raises(RuntimeError, match=r"gradient 1 is torch\.bfloat16"):
        tree_sum(lambda index: torch.zeros(2, dtype=[torch.float32, torch.bfloat16][index]), 2)
    with pytest.raises(RuntimeError, match="shapes"):
        tree_sum(lambda index: torch.zeros(2 + index), 2)


def test_squares_by_hand():
    flat = torch.tensor([3.0, 4.0, 0.0, 1.0, -2.0])
    assert block_squares(flat, block=2).tolist() == [25.0, 1.0, 4.0]
    assert squared_norm(flat, block=2) == 30.0
    assert squared_norm(torch.zeros(0)) == 0.0


def test_blocks_are_added_without_rounding_between():
    """1e16 + 1 rounds to 1e16, so adding in order would lose both ones."""
    assert squared_norm(torch.tensor([1e8, 1.0, 1.0]), block=1) == 1e16 + 2


def test_squares_are_taken_in_float64():
    """In float32 1e-30 squared is 0 and 1e30 squared is infinite."""
    tiny = torch.tensor([1e-30, 1e30])
    assert squared_norm(tiny[:1]) == pytest.approx(1e-60, rel=1e-6)
    assert squared_norm(tiny) == pytest.approx(1e60, rel=1e-6)


def test_norm_has_the_same_bits_for_any_thread_count_and_cut():
    flat = leaves(1, 3 * 65536 + 1000)[0]
    whole = block_squares(flat)
    assert squared_norm(flat) == pytest.approx(flat.double().square().sum().item(), rel=1e-12)
    torch.set_num_threads(2)
    try:
        assert torch.equal(block_squares(flat), whole)
    finally:
        torch.set_num_threads(1)
    cut = torch.cat([block_squares(flat[:65536]), block_squares(flat[65536:])])
    assert torch.equal(cut, whole) and math.fsum(reversed(cut.tolist())) == squared_norm(flat)


def test_norm_of_many_chunks(monkeypatch):
    flat = leaves(2, 1000)[0]
    whole = block_squares(flat, 16)
    monkeypatch.setattr("train.reduction.CHUNK", 2)
    assert torch.equal(block_squares(flat, 16), whole)


def test_non_finite_elements_show():
    assert squared_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
