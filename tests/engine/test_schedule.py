"""The texts that name schedules, and the depths they give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.philox import DEPTH_BLOCK, philox
from engine.schedule import parse_schedule

CANONICAL = [  # text, canonical text, deepest loop
    ("dense", "dense", 4),
    ("dense+lazy", "dense", 4),
    (" exit:2 ", "exit:2", 2),
    ("exit:02+lazy", "exit:2", 2),
    ("exit:gate=0.4", "exit:gate=0.4,min=1,max=4", 4),
    ("exit:gate=.40,max=3", "exit:gate=0.4,min=1,max=3", 3),
    ("exit:gate=1,max=3,min=2", "exit:gate=1.0,min=2,max=3", 3),
    ("exit:gate=7", "exit:gate=1.0,min=1,max=4", 4),
    ("exit:gate=0.00001", "exit:gate=0.00001,min=1,max=4", 4),
    ("exit:periodic=2,4", "exit:periodic=2,4", 4),
    ("exit:mix=4:15,2:60,3:25", "exit:mix=2:60,3:25,4:15", 4),
    ("exit:mix=2:1,4:0", "exit:mix=2:1,4:0", 2),
]


@pytest.mark.parametrize("text, canonical, deepest", CANONICAL)
def test_canonical_text_and_deepest_loop(text, canonical, deepest):
    schedule = parse_schedule(text, 4)
    assert (schedule.text, schedule.max_depth) == (canonical, deepest)
    assert parse_schedule(canonical, 4) == schedule


@given(threshold=st.floats(1e-12, 1.0), low=st.integers(1, 4), high=st.integers(1, 4))
def test_canonical_gate_text_reads_back_to_the_same_threshold(threshold, low, high):
    """A threshold below 1e-4 was once written with an exponent, which parse_schedule refuses."""
    low, high = sorted((low, high))
    schedule = parse_schedule(f"exit:gate={threshold:.25f},min={low},max={high}", 4)
    again = parse_schedule(schedule.text, 4)
    assert again == schedule and (again.low, again.high) == (low, high)


REFUSED = [  # text, what the message names
    ("", "is not a schedule"),
    ("dense:", "is not a schedule"),
    ("dense:4", "is not a schedule"),
    ("full", "is not a schedule"),
    ("exit", "is not a schedule"),
    ("exit:", "is not a schedule"),
    ("exit:deep", "is not a schedule"),
    ("exit:speed=3", "is not a schedule"),
    ("exit:0", "from 1 to 4"),
    ("exit:5", "from 1 to 4"),
    ("exit:-1", "is not a schedule"),
    ("exit:2+piggyback:3", "catch-up 'piggyback:3'"),
    ("exit:2+", "catch-up ''"),
    ("draft:1,k=4", "not supported yet"),
    ("exit:gate=", "threshold ''"),
    ("exit:gate=0", "threshold '0'"),
    ("exit:gate=-0.5", "threshold '-0.5'"),
    ("exit:gate=nan", "threshold 'nan'"),
    ("exit:gate=0.5,low=2", "option 'low'"),
    ("exit:gate=0.5,min=1,min=2", "option 'min'"),
    ("exit:gate=0.5,min=5", "from 1 to 4"),
    ("exit:gate=0.5,min=3,max=2", "min = 3 is above max = 2"),
    ("exit:periodic=2", "a depth and a period"),
    ("exit:periodic=2,0", "a depth and a period"),
    ("exit:periodic=2,4,1", "a depth and a period"),
    ("exit:periodic=5,4", "from 1 to 4"),
    ("exit:mix=2", "DEPTH:WEIGHT"),
    ("exit:mix=2:0.5,3:0.5", "DEPTH:WEIGHT"),
    ("exit:mix=2:1,2:3", "each depth once"),
    ("exit:mix=5:1", "from 1 to 4"),
    ("exit:mix=2:0,3:0", "1..2^32"),
    (f"exit:mix=2:{2**32},3:1", "1..2^32"),
]


@pytest.mark.parametrize("text, named", REFUSED)
def test_refusals_name_the_text_and_the_fault(text, named):
    with pytest.raises(ValueError) as caught:
        parse_schedule(text, 4)
    assert repr(text) in str(caught.value) and named in str(caught.value)


def test_periodic_reads_every_fourth_response_token_at_the_last_loop():
    schedule = parse_schedule("exit:periodic=2,4", 4)
    depths = [schedule.depth(0, 0, 30 + index, index) for index in range(12)]
    assert depths == [2, 2, 2, 4] * 3
    assert sum(depths) / len(depths) == 2.5


def test_fixed_depths_and_the_gate_that_decides_later():
    assert parse_schedule("dense", 3).depth(0, 0, 5, 0) == 3
    assert parse_schedule("exit:2", 3).depth(9, 8, 5, 4) == 2
    assert parse_schedule("exit:gate=0.5", 3).depth(0, 0, 5, 0) is None


def test_mix_takes_the_depth_from_the_keyed_number():
    """Weights 1:2:1 cut the 32-bit range at a quarter and at three quarters."""
    schedule = parse_schedule("exit:mix=1:1,2:2,4:1", 4)
    for position in range(200):
        word = philox((6, 0, position, DEPTH_BLOCK), (5, 0))[0]
        expected = 1 if word < 2**30 else 2 if word < 3 * 2**30 else 4
        assert schedule.depth(5, 6, position, 0) == expected


def test_mix_frequencies():
    """Chi-square of 20,000 positions against 60:25:15; 13.8 is the 0.1 % point at 2 degrees."""
    schedule = parse_schedule("exit:mix=2:60,3:25,4:15", 4)
    draws = [schedule.depth(11, uid, position, 0) for uid in range(40) for position in range(500)]
    observed = [draws.count(depth) for depth in (2, 3, 4)]
    expected = [12_000, 5_000, 3_000]
    assert sum(observed) == 20_000
    assert sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)) < 13.8
