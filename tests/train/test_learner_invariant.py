"""The learner under numerics `invariant`: nothing is replayed, every training forward is compared."""

import pytest
import torch
from learner_cases import ADVANTAGES, make_batches, make_config, make_learner
from tiny_models import keep_rule

from train import replay
from train.dense import dense_logprobs

DTYPES = ["float32", "bfloat16"]


def exact_learner(**options):
    learner = make_learner(make_config(**options))
    keep_rule(learner.model, 64)
    return learner


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hybrid_value_is_the_dense_value(dtype):
    """Ratios are 1, dense minus replay is exactly 0, all trained tokens are audited, no pass is replayed."""
    learner = exact_learner(dtype=dtype)
    assert learner.exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "replay", None)
        patch.setattr(replay, "replay_packed", None)
        found = learner.step(make_batches(learner), 1)
    assert found["ratio/min"] == found["ratio/max"] == 1 and found["ratio/not_one"] == 0
    assert found["policy/dense_minus_replay_max"] == 0
    assert found["replay/audited_tokens"] == found["update/trained_tokens"] > 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_of_the_record_stops_the_run_before_the_update(dtype):
    learner = exact_learner(dtype=dtype)
    batches = make_batches(learner)
    before = learner.masters.flat.clone()
    done = batches[1].log.completions[2]
    wrong = torch.tensor(done.logprobs)
    wrong.view(torch.int32)[3] += 1
    object.__setattr__(done, "logprobs", tuple(wrong.tolist()))
    named = f"cohort 1: the training forward differs.* in 1 of .*sequence 2, position {len(done.request.prompt) + 3}:"
    with pytest.raises(RuntimeError, match=named):
        learner.step(batches, 1)
    assert torch.equal(learner.masters.flat, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_updates_have_the_dense_value_under_their_own_weights(dtype):
    learner = exact_learner(dtype=dtype, epochs=2)
    found = learner.step(make_batches(learner), 1)
    assert found["policy/dense_minus_replay_max"] == 0 and found["ratio/not_one"] == 0
    assert learner.optimizer.updates == 2


def test_cohorts_of_later_updates_are_audited_before_the_first():
    learner = exact_learner(updates_per_rollout=2, audit_cohorts=2)
    found = learner.step(make_batches(learner), 1)
    assert found["replay/audited_tokens"] > found["update/trained_tokens"]


def test_a_dense_forward_in_another_dtype_is_not_compared():
    """bfloat16 values, gradients of a float32 forward: the bits are the replay's, which is packed."""
    learner = exact_learner(dtype="bfloat16", dense_dtype="float32")
    assert not learner.exact
    found = learner.step(make_batches(learner), 1)
    assert found["ratio/not_one"] == 0 and found["policy/dense_minus_replay_max"] > 0
    assert found["replay/audited_tokens"] > 0


def test_reference_equal_to_the_policy_has_no_penalty():
    learner = make_learner(make_config(kl_coefficient=0.1, reference="initial"), reference=True)
    keep_rule(learner.model, 64)
    learner.reference.rule = learner.model.rule
    assert learner.step(make_batches(learner), 1)["loss/kl"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_a_plain_dense_loss(dtype):
    """The rule changes shapes, not the function: gradients agree with those under `shapes` to rounding."""
    updated = []
    for learner in (exact_learner(dtype=dtype), make_learner(make_config(dtype=dtype))):
        batches = make_batches(learner, schedule="exit:2")
        logs = [b.log.completions for b in batches]
        weights = {n: w.clone().requires_grad_() for n, w in learner.model.weights.items()}
        values = dense_logprobs(learner.model, logs[0], 0.9, weights=lambda w=weights: w).logprobs
        (values * torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor([len(c.token_ids) for c in logs[0]]))).sum(
            ).backward()
        updated.append(torch.cat([w.grad.flatten() for n, w in weights.items() if w.grad is not None]).double())
    apart = (updated[0] - updated[1]).norm() / updated[1].norm()
    assert apart < (1e-5 if dtype == "float32" else 0.05)

