"""`models/rounding.py` in bfloat16 to the last bit, where each step is known exactly.

Elementwise float32 steps are done again in numpy, whose float32 is IEEE's, and rounded by the integer
arithmetic of `bfloat16_bits`. A norm is exact where sum, root and quotient are: rows of small
integers whose mean of squares is a square (7, 5, 1, 5 have 25), with eps = 0. All bit patterns take
part: subnormals, ties, overflow. `test_rounding.py` has the roundings one by one on usual numbers.
"""

import numpy as np
import pytest
import torch
from bfloat16_bits import PATTERNS, bfloat16_of, bits_of, is_nan16, narrowed, widened

from models.rotary import signed
from models.rounding import PROFILES, add_norm, rms_norm, rotate, swiglu

FINITE = PATTERNS[(PATTERNS & 0x7FFF) < 0x7F80]
WIDTH = 16


def rounded(x):
    """float32 array -> the bfloat16 nearest to each, as float32."""
    return widened(narrowed(x.view(np.uint32))).view(np.float32)


def numbers(halves):
    return widened(halves).view(np.float32)


def assert_same(found, wanted):
    """found: bfloat16 tensor; wanted: float32 array of bfloat16 numbers. Bits, of NaN that it is one."""
    found, wanted = bits_of(found), narrowed(wanted.reshape(-1).view(np.uint32))
    nan = np.isnan(numbers(wanted))
    wrong = np.flatnonzero(np.where(nan, ~is_nan16(found), found != wanted))
    assert not len(wrong), f"{len(wrong)} differ, first at {wrong[0]}: {found[wrong[0]]:#06x}, {wanted[wrong[0]]:#06x}"
    assert (~nan).mean() > 0.9


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def square_rows(seed=0, count=500):
    """(rows float32 [count, 16] of bfloat16 integers, their root mean square float32 [count, 1], an integer)."""
    generator, rows, roots = np.random.default_rng(seed), [], []
    while len(rows) < count:
        row = generator.integers(-11, 12, (4000, WIDTH))
        square = (row**2).sum(1)
        root = np.sqrt(square / WIDTH).round().astype(int)
        good = (root > 0) & (root**2 * WIDTH == square)
        rows += list(row[good])
        roots += list(root[good])
    scale = 2.0 ** generator.integers(-20, 21, (count, 1))
    rows, roots = np.array(rows[:count]) * scale, np.array(roots[:count])[:, None] * scale
    return rows.astype(np.float32), roots.astype(np.float32)


def unit(rows, roots):
    """rows / roots as the norm computes it: a rounded reciprocal, then a rounded product."""
    return rows * (np.float32(1) / roots)


def halves(x):
    return torch.from_numpy(x).to(torch.bfloat16)


WEIGHTS = np.random.default_rng(1).permutation(FINITE)[:WIDTH * 60].reshape(60, WIDTH)


@pytest.mark.parametrize("profile", PROFILES)
def test_rms_norm(profile):
    rows, roots = square_rows()
    for weight in WEIGHTS:
        normed = unit(rows, roots)
        product = numbers(weight) * (rounded(normed) if profile == "hf" else normed)
        assert_same(rms_norm(halves(rows), bfloat16_of(weight), 0.0, profile), rounded(product))


@pytest.mark.parametrize("profile", PROFILES)
def test_add_norm_over_every_residual(profile):
    """Each bfloat16 number as the residual; what is added is of its size, or far above or below."""
    residual = np.random.default_rng(2).permutation(FINITE)
    residual = numbers(residual[:len(residual) // WIDTH * WIDTH].reshape(-1, WIDTH))
    rows, roots = square_rows(3, len(residual))
    for weight in WEIGHTS[:6]:
        product = numbers(weight) * (rounded(unit(rows, roots)) if profile == "hf" else unit(rows, roots))
        wanted = rounded(residual + (rounded(product) if profile == "hf" else product))
        assert_same(add_norm(halves(residual), halves(rows), bfloat16_of(weight), 0.0, profile), wanted)


@pytest.mark.parametrize("profile", PROFILES)
def test_rotate_over_every_number(profile):
    """A pair turns by any angle: two products and their sum, each rounded under hf, once under fused."""
    generator = np.random.default_rng(4)
    x = numbers(np.concatenate([generator.permutation(FINITE) for _ in range(8)])[:32640 * 16].reshape(-1, 2, 8))
    angle = generator.uniform(0, 6.3, (len(x), 1, 4)).astype(np.float32)
    cos, sin = (np.concatenate([f(angle)] * 2, -1).astype(np.float32) for f in (np.cos, np.sin))
    turned = np.concatenate([-x[..., 4:], x[..., :4]], -1)
    if profile == "hf":
        wanted = rounded(rounded(x * rounded(cos)) + rounded(turned * rounded(sin)))
    else:
        wanted = rounded(x * cos + turned * sin)
    assert_same(rotate(halves(x), torch.from_numpy(cos), signed(torch.from_numpy(sin)), profile), wanted)


@pytest.mark.parametrize("profile", PROFILES)
def test_swiglu_times_every_number(profile):
    """From 32 on silu is the identity in float32 (exp(-32) is below half a unit of 1): the product is known."""
    gate = numbers(PATTERNS[(PATTERNS >= 0x4200) & (PATTERNS < 0x7F80)])
    generator = np.random.default_rng(5)
    for _ in range(12):
        up = numbers(generator.permutation(FINITE))
        chosen = generator.choice(gate, len(up))
        assert_same(swiglu(halves(chosen), halves(up), profile), rounded(chosen * up))


def test_swiglu_multiplies_the_rounded_silu_under_hf():
    """Each bfloat16 number as the gate; its silu is the one that swiglu gives with up = 1."""
    gate, ones = halves(numbers(FINITE)), torch.ones(len(FINITE), dtype=torch.bfloat16)
    silu = numbers(bits_of(swiglu(gate, ones, "hf")))
    for seed in range(4):
        up = numbers(np.random.default_rng(seed).permutation(FINITE))
        assert_same(swiglu(gate, halves(up), "hf"), rounded(silu * up))


def test_silu_of_every_number_is_the_nearest():
    """swiglu with up = 1. Against float64, where an error of 4e-6 in float32 cannot decide the rounding
    (99 % of all numbers). Below -88 exp overflows and the result is -0 instead of about -1e-37 or less."""
    x = torch.from_numpy(numbers(FINITE).copy())
    exact = x.double() * torch.sigmoid(x.double())
    found = swiglu(halves(numbers(FINITE)), torch.ones(len(FINITE), dtype=torch.bfloat16), "hf")
    ends = [narrowed((exact * (1 + slack)).float().numpy().view(np.uint32)) for slack in (-4e-6, 4e-6)]
    near = (bits_of(found) == ends[0]) | (bits_of(found) == ends[1])
    assert (near | ((x < -88) & (found == 0)).numpy()).all()
    assert (ends[0] == ends[1]).mean() > 0.99
