"""The learner: ratio exactly 1, gradients by hand, audits, denominators, versions, reruns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from learner_cases import ADVANTAGES, captured_gradient, make_batches, make_config, make_learner, make_log
from tiny_models import tiny_model

from rollout.log import ScheduleLog
from train import learner as module
from train.dense import dense_logprobs
from train.learner import Batch
from train.reduction import tree_sum
from train.replay import recorded


def with_logprob(log: ScheduleLog, sequence: int, index: int, value: float) -> ScheduleLog:
    completion = log.completions[sequence]
    values = list(completion.logprobs)
    values[index] = value
    changed = replace(completion, logprobs=tuple(values))
    return replace(log, completions=(*log.completions[:sequence], changed, *log.completions[sequence + 1 :]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["audit", "always"])
@pytest.mark.parametrize("schedule", ["dense", "exit:gate=0.6", "exit:mix=1:1,2:1,3:1"])
def test_ratio_is_exactly_one_on_the_first_update(dtype, mode, schedule):
    learner = make_learner(make_config(dtype, replay=mode))
    metrics = learner.step(make_batches(learner, schedule=schedule), 1)
    assert metrics["ratio/min"] == metrics["ratio/max"] == metrics["ratio/mean"] == 1.0
    assert metrics["ratio/not_one"] == 0.0
    tokens = 2 * 4 * 9
    assert metrics["update/trained_tokens"] == tokens
    assert metrics["replay/audited_tokens"] == (tokens if mode == "always" else tokens // 2)


def test_the_ratio_would_not_be_one_without_the_replay():
    """Guards the test above: the dense values themselves differ from the rollout's."""
    learner = make_learner(make_config("bfloat16"))
    metrics = learner.step(make_batches(learner), 1)
    assert metrics["policy/dense_minus_replay_max"] > 0


def test_seconds_fall_to_the_phase_that_took_them(monkeypatch):
    """A clock that only slow parts move: 2 cohorts, one replayed by the audit, one update. Publication used to
    count as optimizer, and adding gradients as dense."""
    learner, now = make_learner(make_config()), [0.0]
    batches = make_batches(learner)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(owner, name, seconds):
        kept = getattr(owner, name)

        def work(*args, **options):
            now[0] += seconds
            return kept(*args, **options)

        monkeypatch.setattr(owner, name, work)

    def slow_tree(leaf, count):
        first = leaf(0)
        now[0] += 100  # added in the middle of the tree
        second = leaf(1)
        now[0] += 300
        return tree_sum(lambda i: (first, second)[i], count)

    monkeypatch.setattr(module, "tree_sum", slow_tree)
    for owner, name, seconds in ((learner.model, "digest", 1), (module, "replay_cheapest", 10),
                                 (module, "dense_logprobs", 2000), (learner.optimizer, "step", 40000),
                                 (learner.model, "publish", 500000)):
        slow(owner, name, seconds)
    metrics = learner.step(batches, 1)
    assert {name: metrics[f"seconds/{name}"] for name in module.PHASES} == {
        "digest": 2, "replay": 10, "dense": 4000, "reduction": 400, "optimizer": 40000, "publication": 500000}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_is_that_of_the_dense_forward_bit_for_bit(dtype):
    """At ratio 1 the loss's gradient at a token is -advantage / tokens: build it by hand."""
    learner = make_learner(make_config(dtype, cohorts=1, micro_batch_sequences=4))
    batches = make_batches(learner)
    log = batches[0].log
    expected = torch.zeros_like(learner.masters.flat)
    learner.masters.collect_into(expected)
    dense = dense_logprobs(
        learner.model, log.completions, 0.9, weights=lambda: learner.masters.differentiable(learner.model)
    )
    advantage = torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(9)
    dense.logprobs.backward((-advantage / 36).to(dense.logprobs.dtype))
    [found], _ = captured_gradient(learner, batches)
    assert torch.equal(found, expected) and found.abs().max() > 0


def test_cohorts_are_summed_along_the_tree():
    alone = []
    for cohort in range(3):
        learner = make_learner(make_config(cohorts=3, denominator=108.0))
        batches = make_batches(learner)
        silent = [b if b.index == cohort else replace(b, advantages=(0.0,) * 4) for b in batches]
        alone += captured_gradient(learner, silent)[0]
    learner = make_learner(make_config(cohorts=3, denominator=108.0))
    [found], _ = captured_gradient(learner, make_batches(learner))
    assert torch.equal(found, tree_sum(lambda i: alone[i].clone(), 3))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_micro_batch_split_changes_rounding_only(size):
    results = []
    for sequences in (4, size):
        learner = make_learner(make_config(cohorts=1, micro_batch_sequences=sequences))
        results.append(captured_gradient(learner, make_batches(learner)))
    ([one], first), ([other], second) = results
    assert (one - other).norm() < 1e-6 * one.norm()
    assert first["loss/loss"] == pytest.approx(second["loss/loss"], rel=1e-9)


def test_reference_equal_to_the_policy_has_a_penalty_of_exactly_zero():
    learner = make_learner(make_config(kl_coefficient=0.1, reference="initial"), reference=True)
    first = learner.step(make_batches(learner), 1)
    assert first["loss/kl"] == 0.0
    second = learner.step(make_batches(learner, step=2), 2)
    assert second["loss/kl"] > 0


def test_groups_of_equal_rewards_still_receive_the_gradient_of_the_penalty():
    """A documented choice: only the policy term of a zero-variance group is zero."""
    learner = make_learner(make_config(kl_coefficient=0.1, reference="other"))
    learner.reference = tiny_model(dtype=torch.float32, seed=1)
    metrics = learner.step(make_batches(learner, advantages=(0.0,) * 4), 1)
    assert metrics["loss/kl"] > 0 and metrics["update/gradient_norm"] > 0


def test_zero_advantages_move_nothing_even_after_a_step_with_momentum():
    learner = make_learner(make_config())
    learner.step(make_batches(learner), 1)
    before = learner.masters.flat.clone()
    metrics = learner.step(make_batches(learner, 2, advantages=(0.0,) * 4), 2)
    assert torch.equal(learner.masters.flat, before)
    assert metrics["update/gradient_norm"] == 0.0 and learner.model.version == 2


def test_zero_advantages_leave_only_the_declared_decay():
    learner = make_learner(make_config(weight_decay=0.1))
    before = learner.masters.flat.clone()
    learner.step(make_batches(learner, advantages=(0.0,) * 4), 1)
    cut = learner.masters.layout.decayed
    assert torch.equal(learner.masters.flat[:cut], before[:cut] * (1 - 0.01 * 0.1))
    assert torch.equal(learner.masters.flat[cut:], before[cut:])


def test_the_gate_never_moves():
    learner = make_learner(make_config(weight_decay=0.1))
    before = learner.model.weights["exit_gate.weight"].clone()
    learner.step(make_batches(learner), 1)
    assert torch.equal(learner.model.weights["exit_gate.weight"], before)
    assert not torch.equal(learner.masters.flat, make_learner(make_config()).masters.flat)


def test_a_changed_bit_stops_the_run_and_is_named():
    learner = make_learner(make_config(replay="always"))
    batches = make_batches(learner)
    old = batches[1].log.completions[2].logprobs[3]
    wrong = torch.tensor(old).view(torch.int32).bitwise_xor(1).view(torch.float32).item()
    batches[1] = replace(batches[1], log=with_logprob(batches[1].log, 2, 3, wrong))
    position = len(batches[1].log.completions[2].request.prompt) + 3
    with pytest.raises(RuntimeError, match=f"cohort 1.*1 of 36.*sequence 2, position {position}"):
        learner.step(batches, 1)
    assert learner.model.version == 0


def test_cohorts_of_later_updates_are_audited_too():
    """They were replayed under newer weights only, so a wrong recorded value of theirs went unnoticed."""
    learner = make_learner(make_config(cohorts=4, replay="always", updates_per_rollout=2))
    batches = make_batches(learner)
    assert learner.step(batches, 1)["replay/audited_tokens"] == 4 * 36
    learner = make_learner(make_config(cohorts=4, replay="always", updates_per_rollout=2))
    batches[3] = replace(batches[3], log=with_logprob(batches[3].log, 0, 0, -1.0))
    with pytest.raises(RuntimeError, match="cohort 3.*1 of 36"):
        learner.step(batches, 1)
    assert learner.model.version == 0


def test_no_gradient_is_kept_between_steps():
    """The leaves held the last one, as large as the masters, during the next rollout."""
    learner = make_learner(make_config())
    learner.step(make_batches(learner), 1)
    assert all(leaf.grad is None for leaf in learner.masters._leaves.values())


def test_audited_cohorts_are_keyed_by_seed_and_step():
    learner = make_learner(make_config(cohorts=8, audit_cohorts=2, audit_every=3))
    chosen = [learner.audited(step) for step in range(1, 200)]
    assert all(len(found) == (2 if (step - 1) % 3 == 0 else 0) for step, found in enumerate(chosen, 1))
    assert chosen == [make_learner(learner.config).audited(step) for step in range(1, 200)]
    assert {cohort for found in chosen for cohort in found} == set(range(8))


def test_unscored_samples_leave_numerator_and_denominator():
    learner = make_learner(make_config(cohorts=1))
    [batch] = make_batches(learner)
    batch = replace(batch, trained=(True, False, True, True))
    [found], metrics = captured_gradient(learner, [batch])
    assert metrics["update/trained_tokens"] == 27
    other = make_learner(make_config(cohorts=1, denominator=27.0))
    silent = replace(batch, advantages=(1.0, 0.0, 0.5, -0.5), trained=(True,) * 4)
    [expected], _ = captured_gradient(other, [silent])
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_other_weights_are_replayed_and_infinite_old_values_are_left_out():
    learner = make_learner(make_config(cohorts=1))
    [batch] = make_batches(learner)
    log = replace(batch.log, header=batch.log.header | {"weights": "0" * 64})
    log = with_logprob(log, 0, 0, float("-inf"))
    metrics = learner.step([replace(batch, log=log)], 1)
    assert metrics["update/unusable_tokens"] == 1
    assert metrics["update/trained_tokens"] == 35
    assert metrics["ratio/not_one"] == 0.0  # the same weights after all, replayed


def test_several_updates_take_whole_cohorts_and_only_the_first_is_on_policy():
    learner = make_learner(make_config(cohorts=4, updates_per_rollout=2, epochs=2))
    found, metrics = captured_gradient(learner, make_batches(learner))
    assert len(found) == 4 and learner.model.version == 4
    assert metrics["ratio/not_one"] == 0.0
    assert metrics["update/trained_tokens"] == 4 * 2 * 36  # each update trains on two cohorts
    assert metrics["loss/clip_fraction_low"] + metrics["loss/clip_fraction_high"] > 0


def test_old_values_stay_those_of_the_rollout_over_updates():
    """In the second epoch the ratio is taken to the recorded values, not to the last replay."""
    learner = make_learner(make_config(cohorts=1, epochs=2))
    batches = make_batches(learner)
    seen = []
    original = module.grpo_loss

    def spy(logp, old, *rest, **options):
        seen.append((logp.detach().clone(), old.clone()))
        return original(logp, old, *rest, **options)

    module.grpo_loss = spy
    try:
        learner.step(batches, 1)
    finally:
        module.grpo_loss = original
    values = recorded(batches[0].log).values
    assert torch.equal(seen[0][1], values) and torch.equal(seen[1][1], values)
    assert torch.equal(seen[0][0], values) and not torch.equal(seen[1][0], values)


@pytest.mark.parametrize("dtype, dense", [("float32", "same"), ("bfloat16", "same"), ("bfloat16", "float32")])
def test_reruns_have_the_same_bits(dtype, dense):
    digests = []
    for _ in range(2):
        learner = make_learner(make_config(dtype, dense_dtype=dense, epochs=2, recompute=dense == "same"))
        for step in (1, 2):
            learner.step(make_batches(learner, step), step)
        digests.append((learner.model.digest(), learner.masters.flat.view(torch.int32).sum().item()))
    assert digests[0] == digests[1]


def test_float32_dense_forward_keeps_the_value_bits():
    learner = make_learner(make_config("bfloat16", dense_dtype="float32"))
    metrics = learner.step(make_batches(learner), 1)
    assert metrics["ratio/not_one"] == 0.0
    assert metrics["policy/dense_minus_replay_max"] > 1e-4  # bfloat16 replay, float32 dense
    assert torch.equal(learner.dense_model.weights["embed"], learner.model.weights["embed"].float())


def test_a_log_of_another_kind_is_refused():
    learner = make_learner(make_config())
    [batch, _] = make_batches(learner)
    header = batch.log.header
    for change, message in (
        ({"dtype": "bfloat16"}, "dtype"),
        ({"profile": "fused"}, "profile"),
        ({"fingerprint": header["fingerprint"] | {"threads": 2}}, "threads"),
    ):
        wrong = Batch(0, replace(batch.log, header=header | change), ADVANTAGES, (True,) * 4)
        with pytest.raises(RuntimeError, match=message):
            learner.step([wrong], 1)


def test_temperature_comes_from_the_log():
    learner = make_learner(make_config(cohorts=1))
    log = make_log(learner.model, temperature=0.5)
    metrics = learner.step([Batch(0, log, ADVANTAGES, (True,) * 4)], 1)
    assert metrics["policy/dense_minus_replay_max"] < 1e-4


def test_tokens_without_a_finite_reference_are_left_out(monkeypatch):
    """0 * NaN in a masked place would be NaN in the loss: they are neither in it nor in the denominator."""
    learner = make_learner(make_config(kl_coefficient=0.1, reference="initial"), reference=True)
    real = module.replay_cheapest

    def blind(model, log, **options):
        found = real(model, log, **options)
        if model is learner.reference:
            found.values[:3] = float("nan")
        return found

    monkeypatch.setattr(module, "replay_cheapest", blind)
    found = learner.step(make_batches(learner), 1)
    assert found["update/unusable_tokens"] == 6 and found["update/trained_tokens"] == 2 * 36 - 6
    assert torch.isfinite(learner.masters.flat).all()
