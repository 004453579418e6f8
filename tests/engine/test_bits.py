"""Bits that must not depend on history, memory or padding, and calls that must not grow with the batch."""

import math

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Capacity, Engine, Request, Sampling
from engine import groups as groups_module
from engine.engine import _Run
from engine.kv import PagedCache
from engine.plan import Pass
from engine.runner import Runner

SCHEDULES = ["dense", "exit:gate=0.55", "exit:periodic=1,3"]
DTYPES = [torch.float32, torch.bfloat16]
SMALL = Capacity(max_sequences=4, max_rows=24, max_span=7, pages=200, page_size=4)


def requests(lengths=(3, 17, 30, 1, 8), new=6):
    return [Request(tuple(tokens(length, seed=i)), new, uid=2**40 * i + 17) for i, length in enumerate(lengths)]


def generate(model, text, capacity=SMALL):
    """A rollout; == between two compares events, ids and the bits of every log-prob."""
    return Engine(model, text, capacity).generate(requests(), Sampling(seed=5, stop_ids=(0,)))


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("profile", ["hf", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rerun_is_the_same_rollout(dtype, profile, text):
    first = generate(tiny_model(dtype=dtype, profile=profile), text)
    assert first == generate(tiny_model(dtype=dtype, profile=profile), text)
    assert all(math.isfinite(p) and p < 0 for done in first.completions for p in done.logprobs)


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("junk", [1e3, math.nan])
def test_what_the_memory_held_before_leaves_no_bits(monkeypatch, junk, dtype, text):
    """Pages are zeroed when taken: 0 * NaN at a masked key would be NaN in every row."""
    model = tiny_model(dtype=dtype)
    clean, init = generate(model, text), PagedCache.__init__

    def dirty(self, *args):
        init(self, *args)
        for store in (self.keys, self.values, self.hidden):
            store.fill_(junk)

    monkeypatch.setattr(PagedCache, "__init__", dirty)
    assert generate(model, text) == clean


def test_the_longest_text_that_the_model_takes_decides_no_bits():
    """It sizes tables only."""
    short, long = (generate(tiny_model(dtype=torch.float32, max_positions=n), "exit:periodic=1,3")
                   for n in (64, 4096))
    assert (short.completions, short.events) == (long.completions, long.events)


@pytest.mark.parametrize("text", SCHEDULES)
def test_few_pages_used_again_and_again_give_the_same_bits(text):
    """Pages of finished sequences come back in another order, full of their keys."""
    model = tiny_model(dtype=torch.float32)
    # 30 + 6 - 1 positions at 3 loops: 27 pages for the largest, 18 for the one before it.
    tight = Capacity(max_sequences=2, max_rows=24, max_span=7, pages=45, page_size=4)
    wide = Capacity(max_sequences=2, max_rows=24, max_span=7, pages=400, page_size=4)
    narrow, roomy = generate(model, text, tight), generate(model, text, wide)
    assert narrow.events == roomy.events and narrow.completions == roomy.completions


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_padded_rows_reaches_no_live_row(monkeypatch, dtype, text):
    """Rows of padding poisoned before the stack and before the head: tokens, exits and bits stay."""
    capacity = Capacity(max_sequences=4, max_rows=24, max_span=7, pages=200, page_size=4, row_multiple=8,
                        head_multiple=8)
    model = tiny_model(dtype=dtype)
    clean = generate(model, text, capacity)
    real, poisoned = {}, []
    run, read_out, loop, readout = Runner.run, Runner.read_out, model.loop, model.readout

    def counted_run(self, spans, ids):
        real["rows"] = sum(span.stop - span.start for span in spans)
        return run(self, spans, ids)

    def counted_read_out(self, hidden):
        real["rows"] = hidden.shape[0]
        return read_out(self, hidden)

    def poison(x):
        x = x.clone()
        x[real["rows"]:] = math.nan
        poisoned.append(x.shape[0] - real["rows"])
        return x

    monkeypatch.setattr(Runner, "run", counted_run)
    monkeypatch.setattr(Runner, "read_out", counted_read_out)
    monkeypatch.setattr(model, "loop", lambda x, *rest: loop(poison(x), *rest))
    monkeypatch.setattr(model, "readout", lambda h: readout(poison(h)))
    assert generate(model, text, capacity) == clean
    assert sum(count > 0 for count in poisoned) > 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_finite_on_its_own(monkeypatch, dtype):
    """Padded rows compute what their neighbour does, so nothing reduced over rows can meet a NaN."""
    model = tiny_model(dtype=dtype)
    loop = model.loop

    def checked(x, *rest):
        y = loop(x, *rest)
        assert x.shape[0] % 8 == 0 and torch.isfinite(x).all() and torch.isfinite(y).all()
        return y

    monkeypatch.setattr(model, "loop", checked)
    generate(model, "exit:periodic=1,3",
             Capacity(max_sequences=4, max_rows=24, max_span=7, pages=200, page_size=4, row_multiple=8))


# ---- calls ----


class Calls(TorchDispatchMode):
    """Counts the tensor operations that reach the dispatcher."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def calls_per_pass(model, text, count, new=6):
    """[(tensor operations, attention groups)] of each pass with `count` sequences of 5 prompt tokens."""
    asked = [Request(tuple(tokens(5, seed=i)), new, uid=i) for i in range(count)]
    run = _Run(Engine(model, text, Capacity(max_sequences=64, page_size=4)), asked, Sampling(seed=1), None)
    found = []
    while run.scheduler.busy:
        with Calls() as calls:
            run.step()
        passed = next(event for event in reversed(run.events) if isinstance(event, Pass))
        classes = {((s.stop - s.start - 1).bit_length() + 1) // 2 for s in passed.spans}
        found.append((calls.count, len(classes)))
    return found


@pytest.mark.parametrize("text", ["dense", "exit:2", "exit:periodic=1,3"])
def test_tensor_calls_do_not_grow_with_the_batch(text):
    """The same passes with 2, 8 and 32 sequences make exactly the same number of tensor calls."""
    model = tiny_model(dtype=torch.float32)
    model.rotary(torch.tensor([0]), 0)  # the first use fills its table
    few = calls_per_pass(model, text, 2)
    assert few == calls_per_pass(model, text, 8) == calls_per_pass(model, text, 32)


def test_tensor_calls_of_mixed_passes_grow_with_the_groups_alone(monkeypatch):
    """A gate scatters sequences over loops and catch-ups. What a pass with 4 sequences costs at most,
    and what one more gathered attention group adds to it, bounds every pass with 48."""
    monkeypatch.setattr(groups_module, "_runs", lambda cut, keys, members, layout: ([], members))
    model = tiny_model(dtype=torch.float32)
    model.rotary(torch.tensor([0]), 0)
    most = {}
    for calls, groups in calls_per_pass(model, "exit:gate=0.55", 4, new=10):
        most[groups] = max(calls, most.get(groups, 0))
    a_group = most[2] - most[1]
    assert 0 < a_group < most[1] / 4
    many = calls_per_pass(model, "exit:gate=0.55", 48, new=10)
    assert max(groups for _, groups in many) == 3
    assert all(calls <= most[1] + a_group * (groups - 1) for calls, groups in many)
