import pytest
import torch

from train.hybrid import hybrid
from train.loss import grpo_loss


def log_probs(count=4096):
    """Dense and replay values a few roundings apart, many near 0 where a rounded sum would show."""
    generator = torch.Generator().manual_seed(3)
    replay = -torch.exp(-16 * torch.rand(count, generator=generator))
    dense = (replay + 1e-6 * torch.rand(count, generator=generator)).requires_grad_()
    return dense, replay


def test_value_has_the_bits_of_replay():
    dense, replay = log_probs()
    assert torch.equal(hybrid(dense, replay).view(torch.int32), replay.view(torch.int32))
    rounded = (dense + (replay - dense).detach()).detach()
    assert not torch.equal(rounded, replay), "the sum that the class replaces would do as well on these values"


def test_gradient_goes_to_dense_unchanged():
    dense, replay = log_probs()
    incoming = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1))
    replay.requires_grad_()
    hybrid(dense, replay).backward(incoming)
    assert torch.equal(dense.grad.view(torch.int32), incoming.view(torch.int32)) and replay.grad is None


def test_gradient_of_the_loss_is_that_of_dense_with_the_same_coefficients():
    """The loss's coefficients depend on the value only (replay); the chain rule behind them is dense's."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 8, generator=generator, requires_grad=True)
    rows = torch.randn(50, 8, generator=generator)

    def dense():
        return torch.log_softmax(rows @ weight.T, -1)[:, 7]

    replay = dense().detach() + 1e-4
    old, advantages = replay - 0.05, torch.randn(50, generator=generator)
    options = {"clip_low": 0.2, "clip_high": 0.2, "denominator": 50}
    grpo_loss(hybrid(dense(), replay), old, advantages, **options)[0].backward()
    through_hybrid, weight.grad = weight.grad, None
    leaf = replay.clone().requires_grad_()
    grpo_loss(leaf, old, advantages, **options)[0].backward()
    dense().backward(leaf.grad)
    assert torch.equal(through_hybrid, weight.grad)


def test_mismatched_inputs_are_our_own_bug():
    with pytest.raises(AssertionError, match="must agree"):
        hybrid(torch.zeros(3, requires_grad=True), torch.zeros(2))
    with pytest.raises(AssertionError, match="must agree"):
        hybrid(torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.float64))
