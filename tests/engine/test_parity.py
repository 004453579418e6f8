"""The engine against the slow reference (tests/reference_rollout.py): text, logits, keys, gate exits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_rollout import (
    dense_keys_values,
    dense_logits,
    dense_states,
    gate_cdf,
    gate_depths,
    reference_rollout,
)
from tiny_models import tiny_model, tokens

from engine import Capacity, Engine, Request, Sampling
from engine.engine import _Run
from engine.kv import PagedCache
from engine.plan import Pass
from engine.runner import Runner
from engine.schedule import parse_schedule

SCHEDULES = ["dense", "exit:1", "exit:2", "exit:gate=0.55", "exit:gate=0.5,min=2", "exit:periodic=1,3",
             "exit:mix=1:2,2:1,3:1"]
SMALL = Capacity(max_sequences=4, max_rows=24, max_span=7, pages=200, page_size=4, row_multiple=4,
                 head_multiple=3)
SAMPLING = Sampling(seed=5, temperature=0.8, stop_ids=(0, 28))


def requests(lengths, new=9):
    return [Request(tuple(tokens(length, seed=i)), new, uid=2**40 * i + 17) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


# ---- text ----


@pytest.mark.parametrize("text", SCHEDULES)
def test_float64_text_is_that_of_the_reference(model, text):
    """Prompts of very different lengths in one batch: positions, masks and pages are each row's own."""
    asked = requests([3, 17, 40, 1, 8, 5])
    found = Engine(model, text, SMALL).generate(asked, SAMPLING).completions
    for request, done in zip(asked, found, strict=True):
        expected = reference_rollout(model, text, request, SAMPLING)
        assert done.request == request
        assert list(done.token_ids) == expected.ids
        assert list(done.exit_depths) == expected.depths
        assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
        assert done.finish_reason == expected.reason


@pytest.mark.parametrize("text", ["exit:3", "exit:gate=1", "exit:gate=0.01,min=3", "exit:mix=3:1,1:0",
                                  "exit:periodic=1,1"])
def test_exit_at_full_depth_is_dense_token_for_token(model, text):
    asked = requests([3, 17, 40, 1], new=12)
    assert (Engine(model, text, SMALL).generate(asked, SAMPLING).completions
            == Engine(model, "dense", SMALL).generate(asked, SAMPLING).completions)


@pytest.mark.parametrize("text", ["dense", "exit:2", "exit:gate=0.55", "exit:mix=1:2,2:1,3:1"])
def test_a_text_cut_and_given_back_as_prompt_goes_on_as_before(model, text):
    """Noise and depths are keyed by position, so where the prompt ends does not matter."""
    whole = requests([5, 12], new=10)
    engine, sampling = Engine(model, text, SMALL), Sampling(seed=4)
    before = engine.generate(whole, sampling).completions
    parts = [Request(done.request.prompt + done.token_ids[:4], 6, done.request.uid) for done in before]
    for done, rest in zip(before, engine.generate(parts, sampling).completions, strict=True):
        assert rest.token_ids == done.token_ids[4:] and rest.exit_depths == done.exit_depths[4:]


@pytest.mark.parametrize("text", ["dense", "exit:periodic=1,3"])
def test_float32_greedy_text_does_not_depend_on_the_batch_size(text):
    """Away from near-ties, as here."""
    model, asked = tiny_model(dtype=torch.float32), requests([3, 17, 30, 1, 8, 5, 9, 12], new=8)
    found = [Engine(model, text, Capacity(max_sequences=size)).generate(asked, Sampling(greedy=True)).completions
             for size in (1, 3, 8)]
    assert len({tuple(done.token_ids for done in batch) for batch in found}) == 1


@settings(max_examples=25)
@given(st.data())
def test_float64_text_depends_on_the_request_alone(data):
    """Not on batch, order of arrival, page size, row caps or padding."""
    lengths, texts = [3, 17, 30, 1, 8], ["dense", "exit:gate=0.55", "exit:mix=1:2,2:1,3:1"]
    model, asked = _shared(), requests([3, 17, 30, 1, 8], new=6)
    text = data.draw(st.sampled_from(texts))
    order = data.draw(st.permutations(range(len(lengths))))
    chosen = order[:data.draw(st.integers(1, len(order)))]
    sequences = data.draw(st.integers(1, 6))
    capacity = Capacity(
        max_sequences=sequences, max_rows=sequences + data.draw(st.integers(0, 40)),
        max_span=data.draw(st.integers(1, 40)), page_size=data.draw(st.integers(1, 40)),
        pages=data.draw(st.sampled_from([120, 300])), row_multiple=data.draw(st.integers(1, 8)),
        head_multiple=data.draw(st.integers(1, 5)))
    found = Engine(model, text, capacity).generate([asked[i] for i in chosen], SAMPLING).completions
    for index, done in zip(chosen, found, strict=True):
        expected = _alone(text, asked[index])
        assert (done.token_ids, done.exit_depths) == (expected.token_ids, expected.exit_depths)


_MADE = {}


def _shared():
    return _MADE.setdefault("model", tiny_model())


def _alone(text, request):
    """The same request in an engine of its own."""
    if (text, request) not in _MADE:
        _MADE[text, request] = Engine(_shared(), text).generate([request], SAMPLING).completions[0]
    return _MADE[text, request]


# ---- logits ----


def run_recorded(monkeypatch, model, text, asked, capacity, sampling=SAMPLING):
    """A rollout and, for each of its read-outs in order, (Readout, logits [V])."""
    logits, read_out = [], Runner.read_out

    def recording(self, hidden):
        found = read_out(self, hidden)
        logits.extend(found.clone())
        return found

    monkeypatch.setattr(Runner, "read_out", recording)
    rollout = Engine(model, text, capacity).generate(asked, sampling)
    readouts = [r for event in rollout.events if isinstance(event, Pass) for r in event.readouts]
    return rollout, list(zip(readouts, logits, strict=True))


def furthest_logit(model, rollout, recorded):
    """Largest difference between recorded log-softmaxed logits and the dense ones at their depth."""
    texts = [[*done.request.prompt, *done.token_ids] for done in rollout.completions]
    dense = [dense_logits(model, text) for text in texts]
    return max((torch.log_softmax(found, -1) - torch.log_softmax(
        dense[r.sequence][r.loop - 1, r.position], -1)).abs().max().item() for r, found in recorded)


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("text", SCHEDULES)
def test_every_readout_is_the_dense_one_at_its_depth(monkeypatch, dtype, limit, text):
    """Cached decoding against a forward over the whole text, 20 tokens a sequence."""
    model = tiny_model(dtype=dtype)
    rollout, recorded = run_recorded(monkeypatch, model, text, requests([3, 17, 40, 1], new=20), SMALL,
                                     Sampling(seed=1))
    assert len(recorded) == 80
    assert furthest_logit(model, rollout, recorded) < limit


@pytest.mark.parametrize("profile", ["hf", "fused"])
@pytest.mark.parametrize("changes", [
    {"tied": True}, {"kv_heads": 4}, {"kv_heads": 1}, {"loops": 1, "layers": 1}, {"loops": 5, "layers": 1},
], ids=str)
def test_other_shapes_and_profiles(monkeypatch, profile, changes):
    """Tied head, no or full sharing of key heads, one loop, five loops."""
    model = tiny_model(profile=profile, **changes)
    text = f"exit:periodic=1,{3 if model.config.loops > 1 else 1}"
    rollout, recorded = run_recorded(monkeypatch, model, text, requests([3, 17, 9], new=7), SMALL)
    assert furthest_logit(model, rollout, recorded) < 1e-10


def test_contexts_that_span_several_attention_groups(monkeypatch):
    """Key classes 1-64, 65-128, 129-256 and query classes 1 to 64 beside each other."""
    model = tiny_model(max_positions=256)
    capacity = Capacity(max_sequences=6, max_rows=90, max_span=50, pages=400, page_size=8, row_multiple=4)
    rollout, recorded = run_recorded(monkeypatch, model, "exit:periodic=1,3",
                                     requests([150, 60, 3, 63, 12, 126], new=8), capacity, Sampling(seed=1))
    assert len({done.token_ids for done in rollout.completions}) == 6
    assert furthest_logit(model, rollout, recorded) < 1e-10


def test_bfloat16_stays_near_dense(monkeypatch):
    """No promise of bits against dense; a wrong row, mask or position is off by far more."""
    model = tiny_model(dtype=torch.bfloat16)
    rollout, recorded = run_recorded(monkeypatch, model, "exit:periodic=2,3", requests([3, 17, 40], new=9), SMALL)
    assert furthest_logit(model, rollout, recorded) < 0.3


# ---- keys and values ----


@pytest.mark.parametrize("text", ["dense", "exit:2", "exit:periodic=1,3", "exit:gate=0.55"])
def test_keys_and_values_of_every_computed_cell(monkeypatch, model, text):
    """Equal to dense at the cell's own loop; never-computed cells of a page hold 0, and a loop that
    was not needed has no page."""
    planes, release = {}, PagedCache.release

    def collecting(self, sequence):
        for loop, count in enumerate(self.held[sequence], start=1):
            pages = torch.tensor(self.table[self.slots[sequence], loop - 1, :count])
            planes[sequence, loop] = tuple(store[:, pages].flatten(1, 2) for store in (self.keys, self.values))
        release(self, sequence)

    monkeypatch.setattr(PagedCache, "release", collecting)
    rollout = Engine(model, text, SMALL).generate(requests([3, 17, 40, 1]), Sampling(seed=1))
    passes = [event for event in rollout.events if isinstance(event, Pass)]
    reached = {(number, loop): stop for one in passes for number, loop, _, stop in one.spans}
    assert ((0, 3) in reached) == (text != "exit:2")
    for number, done in enumerate(rollout.completions):
        dense = dense_keys_values(model, [*done.request.prompt, *done.token_ids])
        for loop in (1, 2, 3):
            stop = reached.get((number, loop), 0)
            for found, expected in zip(planes[number, loop], dense, strict=True):
                assert found.shape[1] == -(-stop // SMALL.page_size) * SMALL.page_size
                assert torch.allclose(found[:, :stop], expected[loop - 1, :, :stop], rtol=0, atol=1e-12)
                assert not found[:, stop:].any()


# ---- gate ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("text", ["exit:gate=0.4", "exit:gate=0.55,min=2", "exit:gate=0.6,max=2"])
def test_gate_exits_are_the_pure_function_of_the_dense_states(dtype, text):
    model = tiny_model(dtype=dtype, seed=3)
    rollout = Engine(model, text, SMALL).generate(requests([3, 17, 40, 1], new=20), Sampling(seed=2))
    schedule, seen = parse_schedule(text, 3), set()
    for done in rollout.completions:
        whole, first = [*done.request.prompt, *done.token_ids], len(done.request.prompt) - 1
        cdf = gate_cdf(model, dense_states(model, whole))[first:-1]
        assert (cdf[:, :-1] - schedule.threshold).abs().min() > 1e-5, "a near-tie: choose another seed"
        assert list(done.exit_depths) == gate_depths(schedule, cdf)
        seen.update(done.exit_depths)
    assert len(seen) > 1


# ---- a model with two equal head rows ----


@pytest.mark.parametrize("text", ["dense", "exit:1", "exit:periodic=1,3"])
def test_greedy_takes_the_lower_of_two_equal_tokens(text):
    model = tiny_model(dtype=torch.float32)
    head = model.weights["head"]
    head[5] *= 4  # often ahead
    head[23] = head[5]
    rollout = Engine(model, text, SMALL).generate(requests([3, 17]), Sampling(greedy=True))
    chosen = {token for done in rollout.completions for token in done.token_ids}
    assert 5 in chosen and 23 not in chosen


def test_pages_come_back_and_slots_too(model):
    run = _Run(Engine(model, "exit:periodic=1,3", SMALL), requests([3, 17, 40, 1, 2, 9, 11]), SAMPLING, None)
    most = 0
    while run.scheduler.busy:
        run.step()
        run.scheduler.check_integrity()
        run.runner.cache.check_integrity()
        most = max(most, int((~run.runner.cache.free).sum()))
    assert most > 10
    assert run.runner.cache.free.all() and (run.runner.cache.owner == -1).all() and not run.runner.cache.room.any()
    assert sorted(run.runner.cache.free_slots) == list(range(SMALL.max_sequences))
    assert not run.runner.cache.slots and not run.runner.cache.held and run.scheduler.reserved == 0
