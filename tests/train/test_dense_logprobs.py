"""Dense log-probs: aligned with the tokens, read out at the logged depths, chunked."""

import pytest
import torch
from learner_cases import make_log
from tiny_models import tiny_model

from models.dense import dense_forward, pack
from train.dense import dense_logprobs
from train.masters import Masters
from train.replay import recorded, replay


def by_hand(model, completions, temperature):
    """One sequence and one token at a time, from the unpacked forward."""
    found = []
    for completion in completions:
        ids = [*completion.request.prompt, *completion.token_ids]
        states = dense_forward(model, pack([ids], model), model.config.loops)
        for index, (token, depth) in enumerate(zip(completion.token_ids, completion.exit_depths, strict=True)):
            row = len(completion.request.prompt) - 1 + index
            logits = model.readout(states[depth - 1][row : row + 1])[0] / temperature
            found.append(logits[token] - logits.exp().sum().log())
    return torch.stack(found)


@pytest.mark.parametrize("schedule", ["dense", "exit:1", "exit:mix=1:1,2:1,3:1"])
def test_equals_the_float64_formula(schedule):
    model = tiny_model()
    log = make_log(model, schedule=schedule, temperature=0.7)
    with torch.no_grad():
        found = dense_logprobs(model, log.completions, 0.7).logprobs
        torch.testing.assert_close(found, by_hand(model, log.completions, 0.7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.3)])
def test_agrees_with_the_replay_to_rounding(dtype, bound):
    model = tiny_model(dtype=dtype)
    log = make_log(model)
    with torch.no_grad():
        found = dense_logprobs(model, log.completions, 0.9).logprobs
    assert (found - replay(model, log).values).abs().max() < bound


def test_loops_run_only_as_deep_as_the_batch_needs(monkeypatch):
    model = tiny_model()
    log = make_log(model, schedule="exit:2")
    calls = []
    loop = model.loop
    monkeypatch.setattr(model, "loop", lambda *a, **k: calls.append(1) or loop(*a, **k))
    dense_logprobs(model, log.completions, 0.9)
    assert len(calls) == 2


def gradient(model, masters, log, **options):
    flat = torch.zeros_like(masters.flat)
    masters.collect_into(flat)
    found = dense_logprobs(model, log.completions, 0.9, weights=lambda: masters.differentiable(model), **options)
    weight = torch.linspace(-1, 1, len(found.logprobs))
    (found.logprobs * weight).sum().backward()
    return flat, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_leaves_the_gradient_bits(dtype):
    model, masters = tiny_model(dtype=dtype), Masters(tiny_model(dtype=torch.float32).weights)
    log = make_log(model)
    plain, _ = gradient(model, masters, log)
    again, _ = gradient(model, masters, log, recompute=True)
    assert torch.equal(plain, again) and plain.abs().max() > 0


def test_chunks_change_rounding_only_and_logits_never_exist_whole(monkeypatch):
    model, masters = tiny_model(dtype=torch.float32), Masters(tiny_model(dtype=torch.float32).weights)
    log = make_log(model)
    rows = []
    readout = model.readout
    monkeypatch.setattr(model, "readout", lambda h, w=None: rows.append(len(h)) or readout(h, w))
    whole, one = gradient(model, masters, log)
    assert max(rows) == log.token_count
    rows.clear()
    parts, few = gradient(model, masters, log, chunk=5)
    assert max(rows) == 5
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(few.entropy, one.entropy, rtol=1e-5, atol=1e-6)
    assert len(few.entropy) == log.token_count


def test_entropy_is_that_of_the_tempered_distribution():
    model = tiny_model()
    log = make_log(model, schedule="dense")
    first = log.completions[0]
    with torch.no_grad():
        states = dense_forward(model, pack([first.request.prompt], model), 3)
        p = (model.readout(states[-1][-1:]) / 0.9).softmax(-1)
        found = dense_logprobs(model, log.completions, 0.9).entropy[0]
    assert found.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-12)


def test_recorded_values_are_aligned_with_the_dense_ones():
    """First and last response token both present, none shifted: depth and token of each agree."""
    model = tiny_model()
    log = make_log(model, schedule="exit:mix=1:1,3:1")
    with torch.no_grad():
        dense = dense_logprobs(model, log.completions, 0.9).logprobs
    difference = (dense.float() - recorded(log).values).abs()
    assert difference.max() < 1e-6
