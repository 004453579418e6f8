"""The exit rule: the official read-out set exactly, the engine's rule, hand-worked numbers."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import GOLDEN

from models.exits import exit_cdf, exit_distribution, exit_loop, exit_probability

THRESHOLDS = (0.0, 0.3, 0.5, 0.9, 0.99, 1.0, 1.5)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "exit-readout" / "exit.safetensors")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("loops", [2, 4])
def test_official_read_out_exactly(golden, loops, name):
    """pdf, CDF and chosen loop of 96 gate patterns; the sigmoid's last bit may differ in float32."""
    at = f"T{loops}.{name}."
    pdf = exit_distribution(golden[at + "gate_logit"], DTYPES[name])
    assert pdf.dtype == DTYPES[name] and pdf.shape == (96, loops)
    if not torch.equal(pdf, golden[at + "exit_pdf"]):
        # The exponential of this machine differs: never by more than a few units in the last place.
        assert name == "fp32" and torch.allclose(pdf, golden[at + "exit_pdf"], rtol=0, atol=2e-7)
        pdf = golden[at + "exit_pdf"]
    cdf = exit_cdf(pdf)
    assert torch.equal(cdf, golden[at + "cdf"])
    for row, threshold in enumerate(THRESHOLDS):
        found = exit_loop(cdf, threshold, "official")
        assert torch.equal(found - 1, golden[at + "exit_step"][row]), threshold


def test_the_engines_rule_never_leaves_early_at_one():
    """In bfloat16 the official comparison leaves at its shipped threshold of 1.0; ours does not."""
    logits = torch.tensor([[2.25, 4.0, 8.0]]).repeat(4, 1)
    cdf = exit_cdf(exit_distribution(logits, torch.bfloat16))
    assert exit_loop(cdf, 1.0, "official").tolist() == [3, 2, 1]
    for threshold in (1.0, 1.5):
        assert exit_loop(cdf, threshold).tolist() == [4, 4, 4]
    saturated = exit_cdf(exit_distribution(torch.full((4, 1), 12.0)))
    assert exit_loop(saturated, 1.0, "official").tolist() == [2]
    assert exit_loop(saturated, 1.0).tolist() == [4]
    assert exit_loop(saturated, 0.999).tolist() == [1]  # below 1 the gate decides


def test_hand_worked_distribution():
    """Gates 1/2, 1/4 and an ignored last one: 1/2, 1/8, the rest 3/8."""
    logits = torch.tensor([[0.0], [-torch.log(torch.tensor(3.0)).item()], [5.0]])
    pdf = exit_distribution(logits, torch.float64)
    assert torch.allclose(pdf, torch.tensor([[0.5, 0.125, 0.375]], dtype=torch.float64), atol=1e-7)
    cdf = exit_cdf(pdf)
    loops = [exit_loop(cdf, threshold).item() for threshold in (0.0, 0.5, 0.51, 0.62, 0.63, 0.999, 1.0)]
    assert loops == [1, 1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loops", [1, 2, 4, 7])
def test_the_cdf_has_the_bits_of_cumsum(dtype, loops):
    """Which a GPU refuses under deterministic kernels: `models.probe --device cuda` failed on it."""
    gates = 3 * torch.randn(loops, 500, generator=torch.Generator().manual_seed(loops))
    pdf = exit_distribution(gates, dtype)
    assert torch.equal(exit_cdf(pdf), pdf.cumsum(-1))


def test_a_threshold_that_is_never_reached_means_the_last_loop():
    cdf = torch.tensor([[0.2, 0.4, 0.9375]])
    assert exit_loop(cdf, 0.99).tolist() == [3]
    assert exit_loop(torch.tensor([[float("nan")] * 3]), 0.5).tolist() == [3]


def test_one_loop_takes_all_the_mass():
    assert exit_distribution(torch.tensor([[-30.0, 30.0]])).tolist() == [[1.0], [1.0]]


def test_float32_whatever_the_logits():
    assert exit_distribution(torch.zeros(3, 2, dtype=torch.bfloat16)).dtype == torch.float32


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"rule = 'hf' is unknown"):
        exit_loop(torch.ones(1, 2), 0.5, "hf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_probability_has_the_same_bits_at_every_place(dtype):
    """torch's sigmoid computes the last few elements of a tensor by another formula; so it does where the
    elements are not adjacent."""
    gates = 2 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    wanted = exit_probability(gates, dtype)
    for size in (1, 2, 7, 8, 15, 16, 17, 31, 33, 48, 63, 65, 100, 128):
        assert torch.equal(torch.cat([exit_probability(part, dtype) for part in gates.split(size)]), wanted), size
    assert torch.equal(exit_probability(torch.stack((gates, gates), -1)[:, 0], dtype), wanted)
    rows = gates.view(4, 1024)[:, :37]
    pdf = torch.cat([exit_distribution(rows[:, n:n + 1], dtype) for n in range(37)])
    assert torch.equal(exit_distribution(rows, dtype), pdf)


def test_a_probability_has_the_value_and_the_slope_of_a_sigmoid():
    gates = torch.tensor([-30.0, -1.0, 0.0, 0.25, 30.0], dtype=torch.float64, requires_grad=True)
    found = exit_probability(gates, torch.float64)
    assert torch.allclose(found, 1 / (1 + torch.exp(-gates)), rtol=1e-15, atol=0)
    found.sum().backward()
    assert torch.allclose(gates.grad, (found * (1 - found)).detach(), rtol=1e-12, atol=1e-15)
    assert exit_probability(torch.zeros(0)).shape == (0,)
