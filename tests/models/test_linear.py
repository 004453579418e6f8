"""The linear operator: one kernel with and without a graph, the gradient of the plain weight."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model, tokens, wide_model

from models import linear as operator
from models.dense import dense_forward, pack
from models.linear import PACKED_FROM, choose_linear, linear, packed_unavailable

DTYPES = [torch.float32, torch.bfloat16]


def needs_packed(dtype):
    reason = packed_unavailable(dtype, "cpu")
    if reason:
        pytest.skip(reason)


def operands(dtype, rows=7, columns=80, width=384):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, width, generator=generator).to(dtype),
            (torch.randn(columns, width, generator=generator) / width**0.5).to(dtype))


@pytest.mark.parametrize("block", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_those_of_a_float64_product(dtype, packed, block):
    if packed:
        needs_packed(dtype)
    x, weight = (part.requires_grad_() for part in operands(dtype))
    other = operator.pack(weight) if packed else None
    found = linear(x, weight, other, block)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found.backward(gradient)
    wide = [part.detach().double() for part in (x, weight, gradient)]
    near = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 2**-5 if dtype == torch.bfloat16 else 1e-4}
    assert torch.allclose(found.double(), wide[0] @ wide[1].T, **near)
    assert torch.allclose(x.grad.double(), wide[2] @ wide[1], **near)
    assert torch.allclose(weight.grad.double(), wide[2].T @ wide[0], **near)
    with torch.no_grad():
        assert torch.equal(linear(x, weight, other, block), found), "the same bits without a graph"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_bits_of_the_plain_operator(dtype):
    """Whatever the forward kernel: backward multiplies by the plain weight in one piece."""
    needs_packed(dtype)
    grads = []
    for options in ({}, {"packed": True}, {"block": 2}, {"packed": True, "block": 2}):
        x, weight = (part.requires_grad_() for part in operands(dtype))
        other = operator.pack(weight) if options.get("packed") else None
        linear(x, weight, other, options.get("block")).backward(torch.ones(7, 80, dtype=dtype))
        grads.append((x.grad, weight.grad))
    for one in grads[1:]:
        assert torch.equal(one[0], grads[0][0]) and torch.equal(one[1], grads[0][1])


def test_packed_and_native_are_other_kernels():
    """At 384 terms most elements differ in a bit: a model must not mix them. (At 64 they may agree.)"""
    needs_packed(torch.float32)
    x, weight = operands(torch.float32, rows=3)
    assert (linear(x, weight, operator.pack(weight)) != F.linear(x, weight)).float().mean() > 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_float32_row_is_a_plain_product(dtype):
    """Also in blocks of one row and with a graph; two rows are not."""
    needs_packed(dtype)
    x, weight = operands(dtype, rows=2)
    packed = operator.pack(weight)
    plain, two = F.linear(x[:1], weight), operator._packed_product(x, packed)
    wanted = plain if dtype == torch.float32 else operator._packed_product(x[:1], packed)
    assert torch.equal(linear(x[:1], weight, packed), wanted) and torch.equal(linear(x, weight, packed), two)
    assert torch.equal(linear(x, weight, packed, 1)[:1], wanted)
    assert torch.equal(linear(x[:1].clone().requires_grad_(), weight, packed), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_publication_is_what_the_packed_operator_multiplies_with(dtype):
    """The packed copies are made anew, those of the head too, and hold the published values."""
    needs_packed(dtype)
    model, other = wide_model(dtype, linear="packed"), wide_model(dtype, linear="packed")
    assert set(model.packed) == {f"core.0.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")} | {"head"}
    changed = {name: weight.float() * 1.25 for name, weight in model.weights.items()}
    model.publish(changed, 1)
    fresh = type(other)(other.config, {n: w.to(dtype) for n, w in changed.items()}, linear="packed")
    states = [dense_forward(m, pack([tokens(9, 64)], m), 3)[-1] for m in (other, model, fresh)]
    assert torch.equal(states[1], states[2]) and not torch.equal(states[0], states[1])
    assert torch.equal(model.readout(states[1]), fresh.readout(states[1]))


def test_choice_by_hand():
    assert choose_linear("native", torch.float32, "cpu", 2**30) == "native"
    assert choose_linear("auto", torch.float32, "cpu", PACKED_FROM - 1) == "native"
    assert choose_linear("auto", torch.float64, "cpu", PACKED_FROM) == "native"
    for dtype in DTYPES:
        needs_packed(dtype)
        assert choose_linear("auto", dtype, "cpu", PACKED_FROM) == choose_linear("packed", dtype, "cpu", 1) == "packed"


@pytest.mark.parametrize("kind, dtype, device, message", [
    ("fast", torch.float32, "cpu", "linear = 'fast' is unknown; use auto, native or packed"),
    ("packed", torch.float64, "cpu", "no such kernel for torch.float64.*use native"),
    ("packed", torch.float32, "cuda", "packed on cpu only, not on cuda; use native")])
def test_what_cannot_be_is_refused(kind, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        choose_linear(kind, dtype, device, 1)


@pytest.mark.parametrize("fault", ["missing", "raising", "wrong"])
def test_private_operators_are_tried_before_they_are_used(monkeypatch, fault):
    """A torch without them, or with others under these names, has no packed kernel; auto does without."""
    def product(x, packed):
        if fault == "missing":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        if fault == "raising":
            raise RuntimeError("mkldnn is not built in\nmore")
        return torch.zeros(2, 16)

    monkeypatch.setattr(operator, "pack", lambda weight: weight)
    monkeypatch.setattr(operator, "_packed_product", product)
    packed_unavailable.cache_clear()
    try:
        assert choose_linear("auto", torch.float32, "cpu", PACKED_FROM) == "native"
        with pytest.raises(ValueError, match="linear = 'packed' is not available"):
            choose_linear("packed", torch.float32, "cpu", 1)
    finally:
        packed_unavailable.cache_clear()


def test_a_model_on_an_unknown_operator_is_our_own_fault():
    model = tiny_model(dtype=torch.float32)
    with pytest.raises(AssertionError, match="linear operator 'auto'"):
        type(model)(model.config, model.weights, linear="auto")
