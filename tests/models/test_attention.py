"""The two attention kernels against float64 written out, and the mask convention."""

import pytest
import torch

from models.attention import attention


def operands(heads=4, kv_heads=2, queries=5, keys=5, width=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, count, size, width, generator=generator, dtype=torch.float64).to(dtype)
            for count, size in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))


def by_hand(q, k, v, mask):
    """One query at a time, one head at a time: head a reads kv head a // (A / K)."""
    out = torch.empty_like(q)
    served = q.shape[1] // k.shape[1]
    for g in range(q.shape[0]):
        for a in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = mask[g, 0, i].nonzero()[:, 0]
                scores = k[g, a // served, seen] @ q[g, a, i] / q.shape[-1] ** 0.5
                out[g, a, i] = torch.softmax(scores, 0) @ v[g, a // served, seen]
    return out


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_grouped_heads_serve_consecutive_query_heads(kernel, heads, kv_heads):
    q, k, v = operands(heads, kv_heads)
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    expected = by_hand(q, k, v, causal)
    assert torch.allclose(attention(q, k, v, causal, kernel), expected, atol=1e-12)
    assert torch.allclose(attention(q, k, v, None, kernel), expected, atol=1e-12), "None is causal"


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_true_means_attend_and_masked_keys_count_exactly_nothing(kernel):
    """Any finite content of masked slots leaves the bits alone: padding is never in the reduction."""
    q, k, v = operands(queries=3, keys=8, dtype=torch.float32)
    mask = (torch.arange(8) < torch.tensor([[2], [5], [6]]))[None, None].expand(2, 1, 3, 8)
    found = attention(q, k, v, mask, kernel)
    assert torch.allclose(found.double(), by_hand(q.double(), k.double(), v.double(), mask), atol=1e-5)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 6:], v2[:, :, 6:] = 1e3, -1e3
    assert torch.equal(attention(q, k2, v2, mask, kernel), found)
    first = attention(q[:, :, :1], k2, v2, mask[:, :, :1], kernel)
    assert torch.allclose(first, found[:, :, :1], atol=1e-6)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_nan_in_a_masked_value_reaches_the_result(kernel):
    """Why caches are zero-filled: weight 0 times NaN is NaN, in every kernel of ours."""
    q, k, v = operands(queries=3, keys=8, dtype=torch.float32)
    mask = torch.zeros(2, 1, 3, 8, dtype=torch.bool)
    mask[..., :4] = True
    v[:, :, 6] = float("nan")
    assert attention(q, k, v, mask, kernel).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 4, 16])
def test_how_keys_lie_in_memory_decides_no_bits_of_eager(queries, dtype):
    """A batched product takes another kernel for keys that lie position by position, as a cache holds them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, queries, 64, generator=generator).to(dtype)
    k, v = (torch.randn(3, 4, 192, 64, generator=generator).to(dtype) for _ in range(2))
    mask = (torch.arange(192) < 150 + torch.arange(queries)[:, None]).expand(3, 1, queries, 192)
    wanted = attention(q, k, v, mask, "eager")
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(attention(q, k, v, mask, "eager"), wanted)


def test_a_float_mask_is_refused():
    """An additive mask and a boolean one mean opposite things by 0 and 1."""
    q, k, v = operands()
    with pytest.raises(AssertionError, match="bool"):
        attention(q, k, v, torch.zeros(2, 1, 5, 5), "sdpa")


def test_an_unknown_kernel_is_refused():
    with pytest.raises(AssertionError, match="'flash'"):
        attention(*operands(), None, "flash")


def test_eager_rounds_scores_scale_mask_and_probabilities_in_bfloat16():
    """The official eager roundings, one by one."""
    q, k, v = operands(heads=2, kv_heads=2, width=8, dtype=torch.bfloat16)
    scores = (q @ k.transpose(2, 3)) * 8 ** -0.5
    assert scores.dtype == torch.bfloat16
    scores = scores + torch.full((5, 5), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)
    shares = torch.softmax(scores.float(), -1).bfloat16()
    assert torch.equal(attention(q, k, v, None, "eager"), shares @ v)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_gradient_by_finite_differences(kernel, kv_heads):
    inputs = [x.requires_grad_() for x in operands(kv_heads=kv_heads)]
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, None, kernel), inputs)
