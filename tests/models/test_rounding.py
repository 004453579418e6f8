"""The table of `models/rounding.py`, row by row, in bfloat16.

`hf`: every step repeated with its rounding, in float64 (products and sums of two bfloat16
numbers are exact there), so the bits are known. `fused`: a float64 reference rounded once;
where the reference is not within float32's own error of a rounding boundary, the bits are
known too.
"""

import pytest
import torch
import torch.nn.functional as F

from models.rotary import signed
from models.rounding import add_norm, attention_kernel, check_profile, rms_norm, rotate, swiglu

EPS = 1e-5


def bf16(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def rounded(x):
    """float64 -> nearest bfloat16, as float64 (by way of float32, as the kernels do)."""
    return x.float().bfloat16().double()


def assert_rounded_once(found, exact, size):
    """`found` is bf16(exact) wherever float32's error, at most 4e-6 of `size`, cannot decide it."""
    assert found.dtype == torch.bfloat16
    slack = 4e-6 * size
    low, high = (exact - slack).float().bfloat16(), (exact + slack).float().bfloat16()
    assert ((found >= low) & (found <= high)).all()
    assert (low == high).double().mean() > 0.98, "the reference decides nearly all elements"


def unit(x):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def test_hf_norm_rounds_after_the_normalisation_and_after_the_weight():
    x, weight = bf16(32, 48), bf16(48, seed=1)
    normed = rms_norm(x, torch.ones(48, dtype=torch.bfloat16), EPS, "hf")
    assert_rounded_once(normed, unit(x), unit(x).abs())
    found = rms_norm(x, weight, EPS, "hf")
    assert torch.equal(found.double(), rounded(weight.double() * normed.double()))
    fused = rms_norm(x, weight, EPS, "fused")
    assert not torch.equal(fused, found)
    assert_rounded_once(fused, unit(x) * weight.double(), (unit(x) * weight.double()).abs())


def test_residual_add_is_a_rounding_of_its_own_in_hf_and_part_of_the_norm_in_fused():
    x, residual, weight = bf16(32, 48), bf16(32, 48, seed=2), bf16(48, seed=1)
    normed = rms_norm(x, weight, EPS, "hf")
    found = add_norm(residual, x, weight, EPS, "hf")
    assert torch.equal(found.double(), rounded(residual.double() + normed.double()))
    exact = unit(x) * weight.double()
    fused = add_norm(residual, x, weight, EPS, "fused")
    assert_rounded_once(fused, residual.double() + exact, residual.double().abs() + exact.abs())
    assert not torch.equal(fused, found)


def test_rotary_rounds_five_times_in_hf_and_once_in_fused():
    x = bf16(24, 3, 8)
    angles = torch.arange(24).float()[:, None, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).repeat(2)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1).double()
    first, second = rounded(x.double() * rounded(cos.double())), rounded(turned * rounded(sin.double()))
    assert torch.equal(rotate(x, cos, signed(sin), "hf").double(), rounded(first + second))
    first, second = x.double() * cos.double(), turned * sin.double()
    fused = rotate(x, cos, signed(sin), "fused")
    assert_rounded_once(fused, first + second, first.abs() + second.abs())
    assert not torch.equal(fused, rotate(x, cos, signed(sin), "hf"))


def test_swiglu_rounds_silu_and_product_in_hf_and_once_in_fused():
    gate, up = bf16(32, 48, scale=2.0), bf16(32, 48, seed=3)
    silu = gate.double() * torch.sigmoid(gate.double())
    ones = torch.ones_like(up)
    assert_rounded_once(swiglu(gate, ones, "hf"), silu, silu.abs())
    found = swiglu(gate, up, "hf")
    assert torch.equal(found.double(), rounded(swiglu(gate, ones, "hf").double() * up.double()))
    fused = swiglu(gate, up, "fused")
    assert_rounded_once(fused, silu * up.double(), (silu * up.double()).abs())
    assert not torch.equal(fused, found)


@pytest.mark.parametrize("profile", ["hf", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_roundings_inside_both_profiles_are_one_function(profile, dtype):
    x, residual, weight, gate = (bf16(8, 16, seed=s).to(dtype) for s in range(4))
    weight = weight[0]
    atol = 1e-5 if dtype == torch.float32 else 1e-13
    found = add_norm(residual, x, weight, EPS, profile)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), residual.double() + unit(x) * weight.double(), atol=atol)
    found = swiglu(gate, x, profile)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), F.silu(gate.double()) * x.double(), atol=atol)


@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_a_region_keeps_the_dtype_of_its_input(profile):
    """A float32 norm weight under a bfloat16 state would turn the residual stream into float32."""
    x, weight = bf16(4, 8), bf16(8, seed=1)
    cos = torch.ones(4, 1, 8)
    assert rms_norm(x, weight, EPS, profile).dtype == torch.bfloat16
    assert add_norm(x, x, weight, EPS, profile).dtype == torch.bfloat16
    assert rotate(x[:, None], cos, cos, profile).dtype == torch.bfloat16
    assert swiglu(x, x, profile).dtype == torch.bfloat16


@pytest.mark.parametrize("profile, dtype, kernel", [
    ("hf", torch.bfloat16, "eager"), ("hf", torch.float32, "sdpa"), ("hf", torch.float64, "sdpa"),
    ("fused", torch.bfloat16, "sdpa"), ("fused", torch.float32, "sdpa"), ("fused", torch.float64, "sdpa")])
def test_attention_kernel_of_a_profile(profile, dtype, kernel):
    assert attention_kernel(profile, dtype) == kernel


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match=r"profile = 'eager' is unknown; use one of hf, fused"):
        check_profile("eager")
