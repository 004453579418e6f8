"""The running exit decision against the pure function of models/exits.py, bit for bit."""

import pytest
import torch

from engine.gate import GateState
from engine.plan import Capacity
from engine.schedule import parse_schedule
from models.exits import exit_cdf, exit_distribution, exit_loop

LOOPS = 4


def walk(gate_logits, text, slots):
    """Exit loop of each column of gate_logits [T, N], its rows in one call a loop."""
    state = GateState(parse_schedule(text, LOOPS), Capacity(max_sequences=64), torch.device("cpu"))
    found, alive = [0] * len(slots), list(range(len(slots)))
    for loop in range(1, LOOPS + 1):
        if not alive:
            break
        leave = state.leaving(gate_logits[loop - 1, alive], [slots[i] for i in alive], [loop] * len(alive))
        for i, leaves in zip(alive, leave, strict=True):
            if leaves:
                found[i] = loop
        alive = [i for i in alive if not found[i]]
    return found, state


@pytest.fixture(scope="module")
def gate_logits():
    return 2 * torch.randn(LOOPS, 64, generator=torch.Generator().manual_seed(0)) - 0.5


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_equals_the_pure_function(gate_logits, threshold):
    expected = exit_loop(exit_cdf(exit_distribution(gate_logits)), threshold).tolist()
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    assert walk(gate_logits, f"exit:gate={threshold}", slots)[0] == expected
    assert len(set(expected)) > 1


def test_equals_the_pure_function_at_exact_ties(gate_logits):
    """Thresholds that are values of the CDF itself: the last bit of the running sum decides.

    A float32 running sum differs from the pure function's in a quarter of these. One row at a
    time on both sides: a float32 sigmoid rounds differently in a vector's body and in its tail.
    """
    for column in range(64):
        own = gate_logits[:, column:column + 1]
        cdf = exit_cdf(exit_distribution(own))
        for threshold in cdf[0, :LOOPS - 1].tolist():
            expected = exit_loop(cdf, threshold).tolist()
            assert walk(own, f"exit:gate={threshold:.30f}", [5])[0] == expected


def test_bounds_hold_the_depth(gate_logits):
    free = exit_loop(exit_cdf(exit_distribution(gate_logits)), 0.5).tolist()
    held, _ = walk(gate_logits, "exit:gate=0.5,min=2,max=3", list(range(64)))
    assert held == [min(max(loop, 2), 3) for loop in free]
    assert min(free) == 1 and max(free) == 4


@pytest.mark.parametrize("text, depth", [("exit:gate=1", 4), ("exit:gate=1,max=3", 3), ("exit:gate=2", 4)])
def test_a_threshold_of_one_never_leaves_early(text, depth):
    """Also where float32 rounds the CDF up to exactly 1 after the first loop."""
    saturated = torch.full((LOOPS, 2), 40.0)
    assert exit_cdf(exit_distribution(saturated))[0, 0] == 1.0
    assert walk(saturated, text, [0, 1])[0] == [depth, depth]


def test_a_slot_starts_afresh_at_loop_one():
    """Nothing of the position (or the sequence) before it is left in the slot."""
    state = GateState(parse_schedule("exit:gate=0.5", LOOPS), Capacity(max_sequences=1), torch.device("cpu"))
    low = torch.tensor([-1.0])  # 0.27 a loop: 0.27, 0.47, 0.61
    for _ in range(2):
        assert [state.leaving(low, [0], [loop])[0] for loop in (1, 2, 3)] == [False, False, True]


def test_rows_at_different_loops_stand_in_one_call():
    state = GateState(parse_schedule("exit:gate=0.5", LOOPS), Capacity(max_sequences=3), torch.device("cpu"))
    low = torch.tensor([-1.0, -1.0, 3.0])
    assert state.leaving(low[:1], [2], [1]) == [False]
    assert state.leaving(low[:2], [2, 0], [2, 1]) == [False, False]
    assert state.leaving(low, [2, 0, 1], [3, 2, 1]) == [True, False, True]
    assert state.leaving(low[:1], [0], [3]) == [True]
