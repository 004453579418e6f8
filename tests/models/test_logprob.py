"""The one log-probability function and the entropy, against hand-worked values."""

import math

import pytest
import torch

from models.logprob import entropy, token_logprob


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_the_temperature_divides_the_logits(temperature):
    """log softmax([0, ln 3] / T); dividing the log-probability afterwards gives another number."""
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, dtype=torch.float64)
    found = token_logprob(logits, torch.tensor([0, 1]), temperature)
    odds = 3 ** (1 / temperature)
    expected = torch.tensor([-math.log(1 + odds), math.log(odds / (1 + odds))], dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-14)
    if temperature != 1:
        wrong = token_logprob(logits, torch.tensor([0, 1]), 1.0) / temperature
        assert (found - wrong).abs().min() > 0.01


def test_it_picks_each_rows_own_token_and_keeps_float32():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([10, 0, 3, 3, 7])
    found = token_logprob(logits, ids, 0.9)
    reference = torch.log_softmax(logits.double() / 0.9, -1)[torch.arange(5), ids]
    assert found.dtype == torch.float32 and found.shape == (5,)
    assert torch.allclose(found.double(), reference, atol=1e-6)


def test_it_is_the_log_softmax_bit_for_bit():
    """Not logit - logsumexp, whose last bits differ."""
    logits = torch.randn(64, 257, generator=torch.Generator().manual_seed(2)) * 4
    ids = torch.arange(64)
    assert torch.equal(token_logprob(logits, ids, 1.0), torch.log_softmax(logits, -1)[ids, ids])


def test_gradient_by_finite_differences():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    torch.autograd.gradcheck(lambda x: token_logprob(x, torch.tensor([4, 0, 2]), 0.7), logits)
    torch.autograd.gradcheck(lambda x: entropy(x, 0.7), logits)


def test_entropy_of_known_distributions():
    uniform = torch.zeros(1, 8)
    skewed = torch.tensor([[0.0, math.log(3.0)]])
    assert entropy(uniform).item() == pytest.approx(math.log(8), rel=1e-6)
    assert entropy(skewed).item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-6)
    assert entropy(skewed, 1e9).item() == pytest.approx(math.log(2), rel=1e-6)


def test_entropy_of_a_cut_vocabulary_is_finite():
    """0 * -inf is NaN; a token that cannot be drawn counts 0."""
    logits = torch.tensor([[0.0, 0.0, -math.inf], [200.0, 0.0, -200.0]])
    assert entropy(logits)[0].item() == pytest.approx(math.log(2), rel=1e-6)
    assert entropy(logits)[1].item() == pytest.approx(0.0, abs=1e-30)
