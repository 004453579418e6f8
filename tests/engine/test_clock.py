"""The clock of a run: every moment belongs to one phase, and nothing depends on it."""

import pytest
import torch
from tiny_models import tiny_model, tokens

import engine.clock
from engine import Capacity, Engine, Request, Sampling
from engine.clock import PHASES, Clock
from engine.plan import Pass
from rollout.log import encode, from_rollout


def test_laps_by_hand(monkeypatch):
    """Start at 10; 1 s of plan, 4 s of passes, 2 s of commit; then 8 s of plan, 16 s of commit."""
    times = iter([10.0, 11.0, 15.0, 17.0, 25.0, 41.0])
    monkeypatch.setattr(engine.clock.time, "perf_counter", lambda: next(times))
    clock = Clock(torch.device("cpu"), synchronise=True)  # there is nothing to wait for on a CPU
    assert clock.lap("plan", "a plan") == "a plan"
    clock.lap("passes")
    clock.end_pass()
    clock.lap("plan")
    clock.end_pass()
    found = clock.seconds()
    assert (found.plan, found.passes, found.commit, found.total) == (9, 4, 18, 31)
    assert found.ends == (7, 31) and found.ran == (4, 4)


@pytest.mark.parametrize("schedule", ["dense", "exit:gate=0.5"])
def test_a_run_says_where_its_time_went(schedule):
    model = tiny_model(dtype=torch.float32)
    requests = [Request(tuple(tokens(3, 29, i)), 4, uid=i) for i in range(3)]
    found = Engine(model, schedule, Capacity(max_sequences=2)).generate(requests, Sampling())
    seconds = found.seconds
    assert all(getattr(seconds, phase) > 0 for phase in PHASES)
    assert len(seconds.ends) == len(seconds.ran) == sum(isinstance(e, Pass) for e in found.events)
    assert list(seconds.ends) == sorted(seconds.ends) and seconds.ends[-1] < seconds.total
    assert list(seconds.ran) == sorted(seconds.ran) and seconds.ran[-1] == seconds.passes


def test_time_is_no_part_of_a_run():
    """A rerun took other seconds; it is the same run, with the same log."""
    model = tiny_model(dtype=torch.float32)
    first, again = (Engine(model).generate([Request((1, 2), 4, uid=1)], Sampling()) for _ in range(2))
    assert first.seconds != again.seconds and first == again
    assert encode(from_rollout(first)) == encode(from_rollout(again))
