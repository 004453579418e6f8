"""What is left out of training leaves loss, gradient and denominator; the mean over sequences."""

from dataclasses import replace

import pytest
import torch
from learner_cases import ADVANTAGES, captured_gradient, make_batches, make_config, make_learner, make_log

from train.dense import dense_logprobs
from train.learner import Batch

STOPS = (3, 7, 11, 20)  # some of the sequences end on one of them, the others by length


@pytest.mark.parametrize("denominator", ["tokens", "sequences"])
def test_sequences_left_out_are_as_if_they_had_not_been_sampled(denominator):
    """Against a batch of the others: same loss, same gradient, to the bit. A denominator that still
    counted the ones left out trained at a lower rate, and nobody saw why."""
    results = []
    for alone in (False, True):
        learner = make_learner(make_config(cohorts=1, denominator=denominator, micro_batch_sequences=1, audit_every=5))
        log = make_log(learner.model, count=8, stop_ids=STOPS)
        kept = [place for place in range(8) if log.completions[place].finish_reason == "stop"]
        assert 1 < len(kept) < 8 and len({len(log.completions[place].token_ids) for place in kept}) > 1
        chosen = kept if alone else range(8)
        some = replace(log, completions=tuple(log.completions[i] for i in chosen),
                       trained=tuple(log.trained[i] for i in chosen))
        advantages = tuple((1.0, -1.0, 0.5, -0.5)[i % 4] for i in chosen)
        batch = Batch(0, some, advantages, tuple(i in kept for i in chosen))
        results.append(captured_gradient(learner, [batch], step=2))
    ([one], first), ([other], second) = results
    assert torch.equal(one, other) and one.abs().max() > 0
    for name in ("loss/loss", "update/trained_tokens", "policy/entropy", "ratio/mean"):
        assert first[name] == second[name], name


@pytest.mark.parametrize("denominator", ["tokens", "sequences", 64.0])
def test_a_batch_of_nothing_but_left_out_sequences_is_exactly_zero(denominator):
    learner = make_learner(make_config(cohorts=2, denominator=denominator, kl_coefficient=0.1, reference="initial"),
                           reference=True)
    before = learner.masters.flat.clone()
    batches = [replace(batch, trained=(False,) * 4) for batch in make_batches(learner)]
    [found], metrics = captured_gradient(learner, batches)
    assert not found.any() and torch.equal(learner.masters.flat, before)
    assert metrics["loss/loss"] == 0.0 and metrics["update/trained_tokens"] == 0
    assert metrics["update/gradient_norm"] == 0.0 and learner.model.version == 1


def test_sequence_mean_gradient_is_that_of_the_dense_forward():
    """At ratio 1 a token's gradient is -advantage / (its sequence's tokens * sequences): built by hand."""
    learner = make_learner(make_config(cohorts=1, denominator="sequences", micro_batch_sequences=4))
    [batch] = make_batches(learner, stop_ids=STOPS)
    lengths = torch.tensor([len(c.token_ids) for c in batch.log.completions])
    assert len(set(lengths.tolist())) > 1
    expected = torch.zeros_like(learner.masters.flat)
    learner.masters.collect_into(expected)
    dense = dense_logprobs(
        learner.model, batch.log.completions, 0.9, weights=lambda: learner.masters.differentiable(learner.model)
    )
    each = -torch.tensor(ADVANTAGES, dtype=torch.float64) / lengths / 4
    dense.logprobs.backward(each.repeat_interleave(lengths).to(dense.logprobs.dtype))
    [found], metrics = captured_gradient(learner, [batch])
    assert (found - expected).norm() < 1e-6 * expected.norm() and found.abs().max() > 0
    assert metrics["loss/loss"] == pytest.approx(0.0, abs=1e-12)  # the mean of -advantage
    assert metrics["update/trained_tokens"] == lengths.sum()


@pytest.mark.parametrize("size", [1, 3])
def test_sequence_mean_does_not_depend_on_micro_batch_or_order_of_cohorts(size):
    """On policy a sequence's token mean is -advantage; of 8 sequences one, with -0.5, is left out."""
    results = []
    for sequences, turned in ((4, False), (size, True)):
        learner = make_learner(make_config(cohorts=2, denominator="sequences", micro_batch_sequences=sequences))
        batches = make_batches(learner, stop_ids=STOPS)
        batches[1] = replace(batches[1], trained=(True, True, True, False))
        results.append(captured_gradient(learner, batches[::-1] if turned else batches))
    ([one], first), ([other], second) = results
    assert (one - other).norm() < 1e-6 * one.norm()
    assert first["loss/loss"] == pytest.approx(-0.5 / 7, abs=1e-12)
    assert second["loss/loss"] == pytest.approx(-0.5 / 7, abs=1e-12)
