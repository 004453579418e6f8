"""Rotary tables: float32 always, the same bits however they came to be."""

import math

import pytest
import torch
from tiny_models import tiny_model

from models.rotary import BLOCK, Rotary, signed

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_frequencies_and_tables_stay_float32_in_every_model_dtype(dtype):
    """In bfloat16 a frequency is off by up to 2^-9: radians at position 1000."""
    rotary, plain = tiny_model(dtype=dtype).rotary, Rotary(6, 500.0, CPU)
    cos, sin = rotary(torch.arange(40), 39)
    assert rotary.inv_freq.dtype == cos.dtype == sin.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, plain.inv_freq)
    assert torch.equal(cos, plain(torch.arange(40), 39)[0])


def test_hand_worked_angles():
    """theta 10^4, D 4: frequencies 1 and 1/100, the two halves alike."""
    cos, sin = Rotary(4, 1e4, CPU)(torch.tensor([0, 3]), 3)
    assert cos.shape == sin.shape == (2, 1, 4)
    assert cos[0, 0].tolist() == [1.0] * 4 and sin[0, 0].tolist() == [0.0] * 4
    expected = torch.tensor([3.0, 0.03, 3.0, 0.03])
    assert torch.allclose(cos[1, 0], expected.cos(), atol=1e-6)
    assert torch.allclose(sin[1, 0], expected.sin() * torch.tensor([-1, -1, 1, 1]), atol=1e-6)


def test_a_position_has_the_same_bits_whenever_its_block_was_made():
    at_once, grown = Rotary(16, 1e6, CPU), Rotary(16, 1e6, CPU)
    wanted = torch.tensor([0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
    expected = at_once(wanted, 2 * BLOCK + 7)
    grown(wanted[:2], 5)
    assert grown.cos.shape[0] == BLOCK
    grown(wanted[:4], BLOCK)
    found = grown(wanted, 2 * BLOCK + 7)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    angles = wanted.float()[:, None, None] * grown.inv_freq.repeat(2)
    assert torch.allclose(found[0], angles.cos(), atol=1e-6) and torch.allclose(found[1], signed(angles.sin()), atol=1e-6)


def test_far_positions_are_as_exact_as_float32_angles_allow():
    position = 60_000
    cos, _ = Rotary(8, 1e6, CPU)(torch.tensor([position]), position)
    for i in range(4):
        angle = position * 1e6 ** (-2 * i / 8)
        assert abs(cos[0, 0, i].item() - math.cos(angle)) < 2 * angle * 2 ** -24 + 1e-6


def test_the_default_dtype_of_torch_has_no_say():
    torch.set_default_dtype(torch.float64)
    try:
        rotary = Rotary(8, 1e6, CPU)
        cos, _ = rotary(torch.arange(9), 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rotary.inv_freq.dtype == cos.dtype == torch.float32


def test_a_table_grown_in_inference_mode_serves_a_graph():
    rotary = Rotary(8, 1e6, CPU)
    with torch.inference_mode():
        rotary(torch.arange(4), 3)
    cos, _ = rotary(torch.arange(4), 3)
    x = torch.ones(4, 1, 8, requires_grad=True)
    (x * cos).sum().backward()
    assert torch.equal(x.grad, cos)
