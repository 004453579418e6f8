import math

import pytest
import torch

from train.loss import NO_TOKENS, grpo_loss, usable, weigh

F64 = torch.float64
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def tensor(values, **options):
    return torch.tensor(values, dtype=F64, **options)


def tokens(count, seed=0):
    """logp, old, advantages, reference [count], float64; ratios away from the clip edges."""
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(count, dtype=F64, generator=generator)
    steps = tensor([-0.9, -0.1, 0.0, 0.05, 0.8])
    old = logp - steps[torch.randint(0, 5, (count,), generator=generator)]
    advantages = tensor([-1.5, -0.5, 0.0, 0.5, 1.5])[torch.randint(0, 5, (count,), generator=generator)]
    return logp, old, advantages, logp + torch.rand(count, dtype=F64, generator=generator) - 0.5


def test_hand_worked_values_and_gradient():
    """Ratios 1, 2, 2, 1/2, 1/2 with advantages 1, 1, -1, 1, -1 and clip range [0.8, 1.3].

    Costs: -1; -min(2, 1.3); max(2, 1.3); -min(.5, .8); max(.5, .8). Sum over denominator 10:
    (-1 - 1.3 + 2 - 0.5 + 0.8) / 10 = 0. Gradients -A * ratio / 10 except where clipped (2nd, 5th)."""
    logp = tensor([-1.0, -1.0, -1.0, -1.0, -1.0], requires_grad=True)
    old = tensor([-1.0, -1 - math.log(2), -1 - math.log(2), -1 + math.log(2), -1 + math.log(2)])
    loss, metrics = grpo_loss(logp, old, tensor([1.0, 1.0, -1.0, 1.0, -1.0]), **CLIP, denominator=10)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert logp.grad.tolist() == pytest.approx([-0.1, 0.0, 0.2, -0.05, 0.0], abs=1e-15)
    assert (metrics.tokens, metrics.clipped_low, metrics.clipped_high, metrics.ratio_changed) == (5, 1, 1, 4)
    assert metrics.ratio_sum == pytest.approx(6.0)
    assert (metrics.ratio_min, metrics.ratio_max) == pytest.approx((0.5, 2.0))


def test_equal_log_probs_give_a_ratio_of_exactly_one():
    old = torch.tensor([-0.1, -1e-6, -17.3], dtype=torch.float32)
    loss, metrics = grpo_loss(old.clone(), old, torch.ones(3), **CLIP, denominator=3)
    assert (loss.item(), metrics.ratio_min, metrics.ratio_max, metrics.ratio_sum) == (-1.0, 1.0, 1.0, 3.0)
    assert metrics.ratio_changed == 0 and metrics.summary()["ratio_not_one"] == 0.0
    moved = old.clone().view(torch.int32).add_(1).view(torch.float32)
    assert grpo_loss(moved, old, torch.ones(3), **CLIP, denominator=3)[1].ratio_changed == 3


def test_clipping_is_asymmetric():
    """Ratio 1.25 is inside [0.8, 1.3] but outside [0.8, 1.2]; ratio 0.75 is outside the lower edge only."""
    logp = tensor([math.log(1.25), math.log(0.75)])
    arguments = (logp, tensor([0.0, 0.0]), tensor([1.0, -1.0]))
    metrics = grpo_loss(*arguments, **CLIP, denominator=2)[1]
    assert (metrics.clipped_low, metrics.clipped_high) == (1, 0)
    metrics = grpo_loss(*arguments, clip_low=0.3, clip_high=0.2, denominator=2)[1]
    assert (metrics.clipped_low, metrics.clipped_high) == (0, 1)


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_gradient_against_finite_differences(kl_coefficient):
    logp, old, advantages, reference = tokens(40)

    def loss(x):
        options = {"reference_logp": reference, "kl_coefficient": kl_coefficient}
        return grpo_loss(x, old, advantages, **CLIP, denominator=40, **options)[0]

    assert torch.autograd.gradcheck(loss, (logp.requires_grad_(),), eps=1e-6, atol=1e-9)


def test_k3_value_and_gradient_by_hand():
    """d = reference - logp = ln 2: k3 = 2 - ln 2 - 1; its derivative in logp is 1 - exp(d) = -1."""
    logp = tensor([-2.0], requires_grad=True)
    reference = tensor([-2.0 + math.log(2)])
    loss, metrics = grpo_loss(
        logp, tensor([-2.0]), tensor([0.0]), **CLIP, denominator=4, reference_logp=reference, kl_coefficient=0.5
    )
    loss.backward()
    assert metrics.kl_sum == pytest.approx(1 - math.log(2), abs=1e-15)
    assert loss.item() == pytest.approx(0.5 * (1 - math.log(2)) / 4, abs=1e-15)
    assert logp.grad.item() == pytest.approx(-0.125, abs=1e-15)


def test_reference_equal_to_the_policy_gives_zero_kl_and_no_gradient():
    logp = torch.tensor([-0.3, -11.0], requires_grad=True)
    loss, metrics = grpo_loss(
        logp, logp.detach(), torch.zeros(2), **CLIP, denominator=2, reference_logp=logp.detach(), kl_coefficient=3.0
    )
    loss.backward()
    assert metrics.kl_sum == 0.0 and loss.item() == 0.0
    assert logp.grad.tolist() == [0.0, 0.0]


def test_kl_is_measured_without_a_coefficient_but_moves_nothing():
    logp, old, advantages, reference = tokens(20)
    plain, _ = grpo_loss(logp, old, advantages, **CLIP, denominator=20)
    measured, metrics = grpo_loss(logp, old, advantages, **CLIP, denominator=20, reference_logp=reference)
    assert measured.item() == plain.item() and metrics.kl_sum > 0
    far = torch.zeros(20, dtype=F64)
    unmoved, metrics = grpo_loss(far - 1e4, far - 1e4, advantages, **CLIP, denominator=20, reference_logp=far)
    assert metrics.kl_sum == math.inf and math.isfinite(unmoved.item())


def test_denominator_divides_loss_and_gradient_once():
    logp, old, advantages, reference = tokens(12)
    results = []
    for denominator in (12, 48):
        x = logp.clone().requires_grad_()
        loss, metrics = grpo_loss(
            x, old, advantages, **CLIP, denominator=denominator, reference_logp=reference, kl_coefficient=0.2
        )
        loss.backward()
        results.append((loss.item(), metrics.loss, x.grad))
    assert results[0][0] == results[0][1] == 4 * results[1][0]
    assert torch.equal(results[0][2], 4 * results[1][2])


@pytest.mark.parametrize("sizes", [[30], [1] * 30, [1, 17, 12], [29, 0, 1]])
def test_micro_batch_split_changes_nothing(sizes):
    """Every token's gradient has the same bits in any split, and the contributions add up."""
    logp, old, advantages, reference = tokens(30)
    options = {**CLIP, "denominator": 30, "kl_coefficient": 0.1}
    whole_logp = logp.clone().requires_grad_()
    whole, expected = grpo_loss(whole_logp, old, advantages, reference_logp=reference, **options)
    whole.backward()
    metrics, gradients = NO_TOKENS, []
    for part in zip(*(x.split(sizes) for x in (logp, old, advantages, reference)), strict=True):
        x = part[0].clone().requires_grad_()
        loss, own = grpo_loss(x, part[1], part[2], reference_logp=part[3], **options)
        loss.backward()
        metrics, gradients = metrics + own, [*gradients, x.grad]
    assert torch.equal(torch.cat(gradients), whole_logp.grad)
    for name in ("tokens", "ratio_min", "ratio_max", "ratio_changed", "clipped_low", "clipped_high"):
        assert getattr(metrics, name) == getattr(expected, name)
    for name in ("loss", "ratio_sum", "kl_sum"):
        assert getattr(metrics, name) == pytest.approx(getattr(expected, name), rel=1e-13)


def test_zero_advantages_give_a_gradient_of_exactly_plus_zero():
    """Also where the ratio overflows to infinity, whose product with 0 is NaN."""
    logp = torch.tensor([-0.1, -2.0, 0.0], requires_grad=True)
    old = torch.tensor([-0.2, -2.0, -1e4])
    loss, _ = grpo_loss(logp, old, torch.tensor([0.0, -0.0, 0.0]), **CLIP, denominator=3)
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad.view(torch.int32).tolist() == [0, 0, 0]


def test_a_clipped_token_whose_ratio_overflows_stays_finite():
    logp = torch.tensor([0.0, -0.5], requires_grad=True)
    loss, metrics = grpo_loss(logp, torch.tensor([-1e4, -0.5]), torch.ones(2), **CLIP, denominator=1)
    loss.backward()
    assert loss.item() == pytest.approx(-2.3) and metrics.clipped_high == 1
    assert logp.grad.tolist() == [0.0, -1.0]


def test_nan_at_untrained_positions_cannot_reach_the_loss():
    """Selecting keeps NaN out of value and gradient; a mask that multiplies would not."""
    packed = tensor([-1.0, math.nan, -2.0, math.nan], requires_grad=True)
    trained = torch.tensor([True, False, True, False])
    old, reference = tensor([-1.1, math.nan, -2.0, 0.0]), tensor([-1.0, math.nan, -1.0, math.nan])
    loss, _ = grpo_loss(
        packed[trained], old[trained], tensor([1.0, -1.0]), **CLIP, denominator=2,
        reference_logp=reference[trained], kl_coefficient=0.1,
    )  # fmt: skip
    loss.backward()
    assert math.isfinite(loss.item()) and packed.grad[trained].isfinite().all()
    assert packed.grad[~trained].tolist() == [0.0, 0.0]


def test_unusable_recorded_values_leave_numerator_and_denominator():
    old = tensor([-1.0, -math.inf, math.nan, -2.0])
    mask = usable(old)
    assert mask.tolist() == [True, False, False, True]
    logp, advantages = tensor([-1.0, -1.0, -1.0, -2.0]), tensor([1.0, 1.0, 1.0, 2.0])
    kept, _ = grpo_loss(logp[mask], old[mask], advantages[mask], **CLIP, denominator=int(mask.sum()))
    assert kept.item() == -1.5


def test_no_tokens_give_zero_with_a_graph():
    empty = torch.zeros(0, requires_grad=True)
    loss, metrics = grpo_loss(empty, torch.zeros(0), torch.zeros(0), **CLIP, denominator=0)
    loss.backward()
    assert loss.item() == 0.0 and metrics == NO_TOKENS
    assert math.isnan(metrics.summary()["ratio_mean"]) and metrics.summary()["loss"] == 0.0


@pytest.mark.parametrize("denominator", [0, -1.0, math.nan, math.inf])
def test_impossible_denominators_are_refused(denominator):
    with pytest.raises(ValueError, match="denominator"):
        grpo_loss(tensor([-1.0]), tensor([-1.0]), tensor([1.0]), **CLIP, denominator=denominator)


# ---- denominators ----

CHOSEN = torch.tensor([True, True, True, True, False, False, True, False])
STARTS = (0, 1, 5, 6, 8)  # sequences of 1, 4, 1 and 2 tokens, of which 1, 3, 0 and 1 are trained


def test_weights_by_hand():
    weights, counted = weigh(CHOSEN, STARTS, "sequences")
    assert (weights.tolist(), counted) == ([1, 1 / 3, 1 / 3, 1 / 3, 0, 0, 1, 0], 3)
    for denominator in ("tokens", 512.0):
        weights, counted = weigh(CHOSEN, STARTS, denominator)
        assert (weights.tolist(), counted, weights.dtype) == (CHOSEN.double().tolist(), 5, F64)
    for denominator in ("tokens", "sequences"):
        assert weigh(torch.zeros(3, dtype=torch.bool), (0, 2, 3), denominator)[1] == 0
        assert weigh(torch.zeros(0, dtype=torch.bool), (0,), denominator)[1] == 0


def test_sequence_mean_by_hand():
    """On policy a token costs -A. Sequences of 1 token with A = 2, of 3 with A = -1 and of 1 with A = 5:
    token means -2, 1 and -5, their mean -2; the token mean would be (-2 + 3 - 5) / 5."""
    logp = torch.zeros(5, requires_grad=True)
    advantages = tensor([2.0, -1.0, -1.0, -1.0, 5.0])
    for denominator, wanted in (("sequences", -2.0), ("tokens", -0.8)):
        weights, counted = weigh(CHOSEN, STARTS, denominator)
        loss, _ = grpo_loss(logp, logp.detach(), advantages, **CLIP, denominator=counted, weights=weights[CHOSEN])
        assert loss.item() == pytest.approx(wanted, abs=1e-15)
    weights, counted = weigh(CHOSEN, STARTS, "sequences")
    loss, _ = grpo_loss(logp, logp.detach(), advantages, **CLIP, denominator=counted, weights=weights[CHOSEN])
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([-2 / 3, 1 / 9, 1 / 9, 1 / 9, -5 / 3], abs=1e-7)


def test_weights_count_the_penalty_too():
    """k3 = 1 - ln 2 at each token: its sequence mean is that, whatever the lengths; metrics stay sums."""
    logp, reference = torch.zeros(5, dtype=F64), torch.full((5,), math.log(2), dtype=F64)
    weights, counted = weigh(CHOSEN, STARTS, "sequences")
    loss, metrics = grpo_loss(
        logp, logp, torch.zeros(5), **CLIP, denominator=counted, weights=weights[CHOSEN],
        reference_logp=reference, kl_coefficient=0.5)  # fmt: skip
    assert loss.item() == pytest.approx(0.5 * (1 - math.log(2)), abs=1e-15)
    assert metrics.kl_sum == pytest.approx(5 * (1 - math.log(2)), abs=1e-14) and metrics.tokens == 5


@pytest.mark.parametrize("denominator", ["tokens", "sequences"])
def test_no_split_and_no_order_of_sequences_changes_a_gradient(denominator):
    """Weights from the cohort, denominator from all: every token's gradient has the same bits in
    any micro-batch, in any order of cohorts and beside masked sequences."""
    lengths = (1, 7, 2, 11, 3, 6)
    parts = [tokens(count, seed) for seed, count in enumerate(lengths)]
    total = sum(lengths) if denominator == "tokens" else len(lengths)

    def gradients(order, masked):
        """Each cohort is two sequences; masked adds a third that is left out. Micro-batches of one sequence."""
        found, counts = {}, 0
        for at in range(0, len(order), 2):
            cohort = [*order[at:at + 2], *([0] if masked else [])]
            chosen = torch.cat([torch.full((lengths[i],), place < 2) for place, i in enumerate(cohort)])
            starts = [0, *torch.tensor([lengths[i] for i in cohort]).cumsum(0).tolist()]
            weights, counted = weigh(chosen, starts, denominator)
            counts += counted
            for place, i in enumerate(cohort[:2]):
                x = parts[i][0].clone().requires_grad_()
                grpo_loss(x, *parts[i][1:3], **CLIP, denominator=total, weights=weights[starts[place]:starts[place + 1]],
                          reference_logp=parts[i][3], kl_coefficient=0.1)[0].backward()
                found[i] = x.grad
        assert counts == total
        return torch.cat([found[i] for i in range(len(lengths))])

    whole = torch.cat([part[0] for part in parts]).requires_grad_()
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    weights, counted = weigh(torch.ones(sum(lengths), dtype=torch.bool), starts, denominator)
    grpo_loss(whole, *(torch.cat([part[k] for part in parts]) for k in (1, 2)), **CLIP, denominator=counted,
              weights=weights, reference_logp=torch.cat([part[3] for part in parts]), kl_coefficient=0.1)[0].backward()
    for order, masked in (((0, 1, 2, 3, 4, 5), False), ((5, 0, 3, 1, 4, 2), False), ((2, 5, 1, 0, 4, 3), True)):
        assert torch.equal(gradients(order, masked), whole.grad)
