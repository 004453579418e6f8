"""Numerics `invariant`: a row's bits do not depend on its company, whatever the schedule, batch and memory.

Where no rule holds on a machine these tests are skipped with the probe's reason. Each clause of the
rule is also switched off, and the bits must then differ somewhere.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import keep_rule, tiny_model, tokens, wide_model

import engine.groups
import engine.runner
from engine import Capacity, Engine, Request, Sampling
from engine.kv import PagedCache
from models import dense, linear
from models.rule import padded
from rollout.log import decode, encode, from_rollout
from rollout.structure import check_structure
from train.dense import dense_logprobs, dense_values
from train.replay import mismatches, recorded, replay, replay_packed

SCHEDULES = ("dense", "exit:2", "exit:gate=0.6", "exit:periodic=1,4", "exit:mix=1:1,2:1,3:2")
ROOMY = Capacity(max_sequences=8, max_rows=512, max_span=256, pages=4000, page_size=16)


def packed_or_native():
    return "native" if linear.packed_unavailable(torch.float32, "cpu") else "packed"


MODELS = {
    "float32 native": lambda: wide_model(), "float32 packed": lambda: wide_model(linear=packed_or_native()),
    "bfloat16 hf": lambda: wide_model(torch.bfloat16),
    "tiny float32": lambda: tiny_model(dtype=torch.float32, max_positions=2048),
    "tiny bfloat16 fused": lambda: tiny_model(dtype=torch.bfloat16, profile="fused", max_positions=2048),
}


@pytest.fixture(scope="module")
def made():
    """Each model once, under its rule."""
    models = {}

    def get(name):
        if name not in models:
            models[name] = MODELS[name]()
        return keep_rule(models[name], 2048)

    return get


def log_of(model, schedule, lengths, new, capacity=ROOMY, temperature=0.9):
    requests = [Request(tuple(tokens(n, model.config.vocab, seed=i)), new, uid=77 + i) for i, n in enumerate(lengths)]
    log = from_rollout(Engine(model, schedule, capacity).generate(requests, Sampling(seed=4, temperature=temperature)))
    return decode(encode(log))


def differing(model, log):
    """Tokens at which one dense forward has other bits than the rollout."""
    found = dense_values(model, log.completions, log.header["temperature"])
    return int((found.view(torch.int32) != recorded(log).values.view(torch.int32)).sum())


def of_sequences(log):
    return {c.request.uid: (c.token_ids, c.logprobs, c.exit_depths) for c in log.completions}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_dense_replay_and_rollout_have_the_same_bits(made, name, schedule):
    model = made(name)
    log = log_of(model, schedule, [3, 70, 17, 130], 9)
    check_structure(log)
    assert log.header["numerics"] == "invariant" and log.header["rule"] == vars(model.rule)
    wanted = recorded(log)
    assert len(mismatches(replay_packed(model, log), wanted)) == 0
    found = replay(model, log, redraw=True)
    assert len(mismatches(found, wanted)) == 0 and found.redrawn.all()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_with_a_graph_has_them_too(made, name, recompute):
    model = made(name)
    log = log_of(model, "exit:gate=0.6", [5, 90, 33], 7)
    weights = {n: w.clone().requires_grad_() for n, w in model.weights.items()}
    found = dense_logprobs(model, log.completions, 0.9, weights=lambda: weights, recompute=recompute, chunk=5).logprobs
    assert torch.equal(found.detach().float(), recorded(log).values)
    found.sum().backward()
    assert all(torch.isfinite(weights[n].grad).all() for n in weights if not n.startswith("exit_gate"))


@pytest.mark.parametrize("name", MODELS)
def test_up_to_2048_positions(made, name):
    """Prompts around every step of the key length, and the longest that the model takes."""
    log = log_of(made(name), "exit:periodic=1,3", [190, 255, 383, 509, 766, 1021, 1533, 2040], 7)
    assert differing(made(name), log) == 0


WORKLOADS = st.tuples(
    st.lists(st.integers(1, 150), min_size=1, max_size=7), st.integers(1, 12), st.sampled_from(SCHEDULES),
    st.builds(Capacity, max_sequences=st.integers(1, 6), max_rows=st.integers(6, 300), max_span=st.integers(1, 90),
              pages=st.sampled_from([260, 700]), page_size=st.sampled_from([5, 16]),
              row_multiple=st.sampled_from([1, 3]), head_multiple=st.sampled_from([1, 5])))


@pytest.mark.parametrize("name", MODELS)
def test_no_workload_changes_a_sequence(made, name):
    """Batch, order, chunks, catch-up bursts, capacity and reading in place: a sequence keeps tokens, exits
    and log-prob bits, which are those of the dense forward."""
    model = made(name)

    @settings(max_examples=12, deadline=None)
    @given(WORKLOADS, st.booleans())
    def check(workload, in_place):
        lengths, new, schedule, capacity = workload
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.runner, "IN_PLACE_FROM", 1 if in_place else 2**40)
            found = log_of(model, schedule, lengths, new, capacity)
        assert differing(model, found) == 0
        assert of_sequences(found) == of_sequences(log_of(model, schedule, lengths, new))

    check()


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_many_workloads(made, name):
    model = made(name)

    @settings(max_examples=300, deadline=None)
    @given(WORKLOADS)
    def check(workload):
        lengths, new, schedule, capacity = workload
        assert differing(model, log_of(model, schedule, lengths, new, capacity)) == 0

    check()


@pytest.mark.parametrize("name", MODELS)
def test_full_depth_text_does_not_depend_on_the_schedule(made, name):
    """exit at the last loop is dense, bit for bit, in every dtype."""
    model = made(name)
    whole, last = (log_of(model, text, [4, 66, 20], 8) for text in ("dense", f"exit:{model.config.loops}"))
    assert of_sequences(whole) == of_sequences(last)


@pytest.mark.parametrize("junk", [1e3, float("nan")])
def test_what_lies_behind_a_plane_leaves_no_bits(monkeypatch, made, junk):
    """Keys are read in place up to the key length, beyond what was written: those must be finite."""
    monkeypatch.setattr(engine.runner, "IN_PLACE_FROM", 1)
    model = made("float32 native")
    clean, init = log_of(model, "exit:periodic=1,3", [3, 70, 17], 9), PagedCache.__init__

    def dirty(self, *args):
        init(self, *args)
        for store in (self.keys, self.values, self.hidden):
            store.fill_(junk)

    monkeypatch.setattr(PagedCache, "__init__", dirty)
    assert of_sequences(log_of(model, "exit:periodic=1,3", [3, 70, 17], 9)) == of_sequences(clean)


def test_a_log_of_shapes_is_not_replayed_packed():
    model = tiny_model(dtype=torch.float32)
    log = log_of(model, "exit:2", [3, 9], 5, replace(ROOMY, pages=64))
    with pytest.raises(RuntimeError, match="numerics are shapes.*replay it as passes"):
        replay_packed(model, log)


def test_a_log_of_another_rule_or_operator_is_refused_by_name(made):
    model = made("tiny float32")
    log = log_of(model, "exit:2", [3, 9], 5)
    kept = model.rule
    for rule, field in ((None, "numerics"), (replace(kept, query_block=2 * kept.query_block), "rule")):
        model.rule = rule
        with pytest.raises(RuntimeError, match=f"the log was made with {field} ="):
            replay(model, log)
    model.rule = kept


def test_longer_sequences_than_were_tried_are_refused():
    """In the engine, in a dense forward, and by the scheduler's check before a run."""
    model = keep_rule(tiny_model(dtype=torch.float32, max_positions=2048), 100)
    assert model.rule.length == 128
    assert differing(model, log_of(model, "exit:2", [120], 8)) == 0
    with pytest.raises(ValueError, match="125 prompt \\+ 4 new tokens; numerics invariant were tried up to 128"):
        log_of(model, "exit:2", [125], 4)
    with pytest.raises(ValueError, match="a sequence has 129 tokens; numerics invariant were tried up to 128"):
        dense.dense_forward(model, dense.pack([tokens(129)], model), 1)


# ---- the rule switched off, clause by clause ----


def fails_without(model, log_lengths, new=6):
    """Bits that differ between rollouts of several shapes and the dense forward."""
    wrong = 0
    for capacity in (ROOMY, replace(ROOMY, max_sequences=1, max_span=7, max_rows=8), replace(ROOMY, max_sequences=3)):
        wrong += differing(model, log_of(model, "exit:mix=1:1,3:1", log_lengths, new, capacity))
    return wrong


def needed(good, what):
    if good:
        pytest.skip(f"this machine does not need it: {what}")


@pytest.mark.parametrize("name, clause, value", [
    ("float32 native", "rows", 1), ("float32 native", "head_rows", 1), ("float32 native", "queries", 1),
    ("tiny float32", "rows", 1)])
def test_without_padding_bits_differ(made, name, clause, value):
    """GEMM rows, head rows, query rows; and silu's tail, which 24 columns leave in the tiny model."""
    model = made(name)
    kept = model.rule
    needed(getattr(kept, clause) == value, clause)
    assert fails_without(model, [3, 40, 21]) == 0
    block = {"rows": "row_block", "head_rows": "head_block", "queries": "query_block"}[clause]
    model.rule = replace(kept, **{clause: value, block: max(getattr(kept, block), 64)})
    assert fails_without(model, [3, 40, 21]) > 0


def test_without_key_lengths_by_position_bits_differ(monkeypatch, made):
    """Key lengths by the end of the span, rounded to 16 as a plain engine would."""
    model = made("float32 native")
    assert fails_without(model, [290, 420], 4) == 0

    def by_span(start, stop, block):
        return [(at, min(at + block, stop), padded(stop, 16)) for at in range(start, stop, block)]

    monkeypatch.setattr(engine.groups, "pieces", by_span)
    assert fails_without(model, [290, 420], 4) > 0


def test_without_blocks_bits_differ():
    """bfloat16 products of 1,024 terms on a CPU with matrix units add in another order from some row count on."""
    model = keep_rule(wide_model(torch.bfloat16, hidden=1024, head_dim=64, loops=2), 256)
    kept = model.rule
    needed(kept.row_block == 1024, "row_block")
    lengths = [60, 100]

    def run():
        return differing(model, log_of(model, "exit:2", lengths, 6, replace(ROOMY, max_span=8, max_rows=16)))

    assert run() == 0
    model.rule = replace(kept, row_block=1024)
    assert run() > 0


def test_the_dense_forward_cannot_leave_its_padding_out(monkeypatch, made):
    model = made("float32 native")
    needed(model.rule.rows == 1, "rows")
    log = log_of(model, "exit:2", [2, 1], 1)  # 3 rows in all
    assert differing(model, log) == 0
    monkeypatch.setattr(dense, "pad_rows", lambda x, multiple: x)
    with pytest.raises(AssertionError, match="3 rows break the shape rule"):
        differing(model, log)
