"""The running exit decision against the pure function of models/exits.py, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import keep_rule, wide_model

from engine.gate import GateState
from engine.plan import Capacity
from engine.schedule import parse_schedule
from models.exits import exit_cdf, exit_distribution, exit_loop

LOOPS = 4


def walk(gate_logits, text, slots):
    """Exit loop of each column of gate_logits [T, N], its rows in one call a loop."""
    state = GateState(parse_schedule(text, LOOPS), Capacity(max_sequences=64))
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

    A float32 running sum differs from the pure function's in a quarter of these.
    """
    cdf = exit_cdf(exit_distribution(gate_logits))
    for column in range(64):
        own = gate_logits[:, column:column + 1]
        for threshold in cdf[column, :LOOPS - 1].tolist():
            expected = exit_loop(cdf[column:column + 1], threshold).tolist()
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
    state = GateState(parse_schedule("exit:gate=0.5", LOOPS), Capacity(max_sequences=1))
    low = torch.tensor([-1.0])  # 0.27 a loop: 0.27, 0.47, 0.61
    for _ in range(2):
        assert [state.leaving(low, [0], [loop])[0] for loop in (1, 2, 3)] == [False, False, True]


def test_rows_at_different_loops_stand_in_one_call():
    state = GateState(parse_schedule("exit:gate=0.5", LOOPS), Capacity(max_sequences=3))
    low = torch.tensor([-1.0, -1.0, 3.0])
    assert state.leaving(low[:1], [2], [1]) == [False]
    assert state.leaving(low[:2], [2, 0], [2, 1]) == [False, False]
    assert state.leaving(low, [2, 0, 1], [3, 2, 1]) == [True, False, True]
    assert state.leaving(low[:1], [0], [3]) == [True]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**20))
def test_no_company_changes_an_exit_or_a_bit_of_the_state(sizes, seed):
    """Rows in calls of any size, in any order, at any place, against each row alone.

    A float32 sigmoid has other bits in a vector's body than in its tail: about 3 % of the rows had
    another state alone than among 32. The threshold is a CDF value of some row, where the last bit decides.
    """
    generator, count = torch.Generator().manual_seed(seed), sum(sizes)
    gates = 2 * torch.randn(LOOPS, count, generator=generator) - 0.5
    threshold = exit_cdf(exit_distribution(gates[:, :1]))[0, seed % (LOOPS - 1)].item()
    schedule = parse_schedule(f"exit:gate={threshold:.30f}", LOOPS)
    alone, together = (GateState(schedule, Capacity(max_sequences=count)) for _ in range(2))
    order = torch.randperm(count, generator=generator)
    for loop in range(1, LOOPS + 1):
        wanted = [alone.leaving(gates[loop - 1, row:row + 1], [row], [loop])[0] for row in range(count)]
        for rows in order.split(sizes):
            found = together.leaving(gates[loop - 1, rows], rows.tolist(), [loop] * len(rows))
            assert found == [wanted[row] for row in rows.tolist()]
        assert np.array_equal(alone.remaining, together.remaining) and np.array_equal(alone.cdf, together.cdf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_the_rule_a_hidden_state_decides_alone(dtype):
    """From hidden states on: gate logits and the state behind them, in every smaller batch and at every place."""
    model = keep_rule(wide_model(dtype), 64)
    model.wide["exit_gate.weight"].copy_(torch.randn(1, 256, generator=torch.Generator().manual_seed(3)) / 16)
    hidden = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)).to(dtype)

    def states(size):
        state = GateState(parse_schedule("exit:gate=0.5", LOOPS), Capacity(max_sequences=96))
        for rows in torch.arange(96).split(size):
            state.leaving(model.gate(hidden[rows]), rows.tolist(), [1] * len(rows))
        return torch.from_numpy(np.stack((state.remaining.astype(np.float64), state.cdf)))

    wanted = states(96)
    for size in (*range(1, 34), 47, 64, 65):
        assert torch.equal(states(size), wanted), size
