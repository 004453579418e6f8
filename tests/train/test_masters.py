"""Masters: which weights are trained, one cast to the compute copy, float32 sums of gradients."""

import torch
from tiny_models import tiny_model

from models.dense import dense_forward, pack
from train.masters import Masters, _Use


def gradient_of(model, masters, ids):
    """Float32 gradient of a scalar of the dense forward's logits, and the flat buffer."""
    flat = torch.zeros_like(masters.flat)
    masters.collect_into(flat)
    states = dense_forward(model, pack([ids], model), 3, weights=lambda: masters.differentiable(model))
    model.readout(states[-1], masters.differentiable(model)).square().mean().backward()
    return masters.layout.views(flat)


def test_gate_is_frozen_and_everything_else_is_trained():
    model = tiny_model(dtype=torch.float32)
    masters = Masters(model.weights)
    assert set(model.weights) - set(masters.layout.names) == {"exit_gate.weight", "exit_gate.bias"}
    assert set(masters.tensors()) == set(model.weights)
    for name, tensor in masters.tensors().items():
        assert torch.equal(tensor, model.weights[name])


def test_norms_are_not_decayed():
    masters = Masters(tiny_model(dtype=torch.float32).weights)
    for name, offset, shape in zip(masters.layout.names, masters.layout.offsets, masters.layout.shapes, strict=True):
        assert (offset >= masters.layout.decayed) == (len(shape) == 1), name


def test_compute_copy_is_one_cast_of_the_master():
    model = tiny_model(dtype=torch.bfloat16)
    masters = Masters(tiny_model(dtype=torch.float32).weights)
    masters.flat.mul_(1.001)  # off the bfloat16 grid
    model.publish(masters.tensors(), 3)
    assert model.version == 3
    for name, tensor in masters.tensors().items():
        assert torch.equal(model.weights[name], tensor.to(torch.bfloat16)), name
    assert torch.equal(model.wide["head"], model.weights["head"].float())


def test_uses_of_a_bfloat16_weight_are_summed_in_float32():
    """1 + 2^-9 is no bfloat16 number: summing the two uses in bfloat16 would give 1."""
    leaf = torch.zeros(1, requires_grad=True)
    compute = torch.ones(1, dtype=torch.bfloat16)
    first, second = _Use.apply(leaf, compute), _Use.apply(leaf, compute)
    small = torch.tensor([2.0**-9], dtype=torch.bfloat16)
    (first.sum() + (second * small).sum()).backward()
    assert leaf.grad.item() == 1.0 + 2.0**-9


def test_gradients_land_in_the_buffer_and_add_up_over_micro_batches():
    model = tiny_model(dtype=torch.float32)
    masters = Masters(model.weights)
    one = {name: view.clone() for name, view in gradient_of(model, masters, [1, 2, 3]).items()}
    other = {name: view.clone() for name, view in gradient_of(model, masters, [4, 5]).items()}
    flat = torch.zeros_like(masters.flat)
    masters.collect_into(flat)
    for ids in ([1, 2, 3], [4, 5]):
        states = dense_forward(model, pack([ids], model), 3, weights=lambda: masters.differentiable(model))
        model.readout(states[-1], masters.differentiable(model)).square().mean().backward()
    for name, view in masters.layout.views(flat).items():
        torch.testing.assert_close(view, one[name] + other[name], rtol=1e-6, atol=1e-9)
        assert view.abs().max() > 0, name


def test_gradient_of_a_tied_matrix_is_the_sum_of_both_uses():
    """Tying must not count a use twice, nor drop one: compare with the untied clone."""
    tied = tiny_model(dtype=torch.float32, tied=True)
    untied = tiny_model(dtype=torch.float32)
    untied.publish({**tied.weights, "head": tied.weights["embed"]}, 0)
    found = gradient_of(tied, Masters(tied.weights), [3, 1, 4, 1, 5])["embed"]
    parts = gradient_of(untied, Masters(untied.weights), [3, 1, 4, 1, 5])
    torch.testing.assert_close(found, parts["embed"] + parts["head"], rtol=1e-5, atol=1e-8)
