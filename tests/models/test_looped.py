"""The model object: weights it accepts, publication, digest, and the verbs' small print."""

import re

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_config, tiny_model, tiny_weights, tokens

from models.attention import attention
from models.dense import dense_forward, pack
from models.looped import LoopedLM


def masters(model, seed):
    """Float32 masters that are not representable in bfloat16, with gradients required."""
    return {name: (w.float() + 1e-3 * (i + seed)).requires_grad_()
            for i, (name, w) in enumerate(model.weights.items())}


# ---- weights ----


def build(**replaced):
    weights = {name: w.float() for name, w in tiny_weights(tiny_config()).items()} | replaced
    return LoopedLM(tiny_config(), weights)


def off_boundary(count, offset):
    """`count` floats that start `offset` floats behind a 16-byte boundary."""
    buffer = torch.zeros(count + 8)
    start = (-buffer.data_ptr() // 4) % 4 + offset
    return buffer[start:start + count]


def test_a_weight_off_a_16_byte_boundary_is_refused():
    """Its matrix products would have other bits: the classic view of a mapped file."""
    view = off_boundary(29 * 16, 1).view(29, 16)
    with pytest.raises(AssertionError, match=r"head starts off a 16-byte boundary"):
        build(head=view)
    build(head=off_boundary(29 * 16, 0).view(29, 16))


def test_a_column_major_weight_is_refused():
    with pytest.raises(AssertionError, match=r"core\.1\.q: .*strides \(1, 24\); expected .*row-major"):
        build(**{"core.1.q": torch.zeros(16, 24).t()})


def test_a_mis_shaped_missing_or_odd_weight_is_refused():
    with pytest.raises(AssertionError, match=r"norm: shape \(15,\)"):
        build(norm=torch.ones(15))
    with pytest.raises(AssertionError, match=r"core\.0\.up is torch\.float64 .* embed is torch\.float32"):
        build(**{"core.0.up": torch.zeros(24, 16, dtype=torch.float64)})
    weights = tiny_weights(tiny_config())
    with pytest.raises(AssertionError, match=re.escape("{'norm'}")):
        LoopedLM(tiny_config(), {name: w for name, w in weights.items() if name != "norm"})


def test_float16_weights_are_refused_by_name():
    weights = {name: w.half() for name, w in tiny_weights(tiny_config()).items()}
    with pytest.raises(ValueError, match=r"'float16'.*not supported"):
        LoopedLM(tiny_config(), weights)


# ---- publication ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_publication_is_one_cast_and_refills_every_copy_in_place(dtype, tied):
    model = tiny_model(dtype=dtype, tied=tied)
    places = {name: w.data_ptr() for name, w in [*model.weights.items(), *(("wide " + n, w) for n, w in
                                                                            model.wide.items())]}
    new = masters(model, seed=1)
    model.publish(new, 7)
    assert model.version == 7
    for name, w in model.weights.items():
        assert torch.equal(w, new[name].detach().to(dtype)) and w.data_ptr() == places[name], name
        assert not w.requires_grad, "masters' graph must not reach the compute copy"
    sources = {"head": "embed" if tied else "head"}
    for name, w in model.wide.items():
        assert w.dtype == torch.float32 and w.data_ptr() == places["wide " + name], name
        assert torch.equal(w, model.weights[sources.get(name, name)].float()), "not a copy of the masters"
    h = torch.randn(3, 16).to(dtype)
    assert torch.equal(model.readout(h), F.linear(h.float(), model.weights[sources["head"]].float()))


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_a_faulty_publication_is_refused_before_anything_is_written(fault):
    model = tiny_model(dtype=torch.bfloat16)
    before, new = model.digest(), masters(model, seed=1)
    if fault == "missing":
        del new["head"]  # the last one: earlier ones must not have been written
    elif fault == "shape":
        new["head"] = torch.zeros(29, 15)
    else:
        new["core.9.q"] = torch.zeros(1)
    name = "core.9.q" if fault == "unknown" else "head"
    with pytest.raises(RuntimeError, match=rf"publication of version 7: tensor '{re.escape(name)}'"):
        model.publish(new, 7)
    assert model.digest() == before and model.version == 0


def test_publishing_the_same_values_changes_no_bit():
    model = tiny_model(dtype=torch.bfloat16)
    before = model.digest()
    model.publish({name: w.float() for name, w in model.weights.items()}, 1)
    assert model.digest() == before


# ---- digest ----


def flip_lowest_bit(weight, index):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    weight.view(-1).view(kind)[index] ^= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_flipped_bit_of_any_tensor_changes_the_digest(dtype):
    model = tiny_model(dtype=dtype)
    seen = {model.digest()}
    for weight in model.weights.values():
        flip_lowest_bit(weight, -1)
        digest = model.digest()
        assert digest not in seen and len(digest) == 64
        seen.add(digest)


def test_the_digest_is_of_values_not_of_objects():
    assert tiny_model(dtype=torch.float32).digest() == tiny_model(dtype=torch.float32).digest()
    assert tiny_model(dtype=torch.float32).digest() != tiny_model(dtype=torch.bfloat16).digest()


@pytest.mark.parametrize("change", [{"rope_theta": 501.0}, {"rms_eps": 2e-6}, {"loops": 4}],
                         ids=lambda c: next(iter(c)))
def test_the_digest_covers_what_else_decides_the_function(change):
    """Two models with the same weights and another rotary base are two policies."""
    assert tiny_model(**change).digest() != tiny_model().digest()


# ---- verbs ----


def test_embed_is_a_plain_row_lookup():
    model = tiny_model(dtype=torch.bfloat16)
    assert torch.equal(model.embed(torch.tensor([3, 0, 3])), model.weights["embed"][[3, 0, 3]])


@pytest.mark.parametrize("dtype, expected", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_logits_and_gates_are_wide(dtype, expected):
    model = tiny_model(dtype=dtype)
    h = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits, gate = model.readout(h), model.gate(h)
    assert logits.dtype == gate.dtype == expected
    assert logits.shape == (5, 29) and gate.shape == (5,)
    weight, bias = (model.weights[f"exit_gate.{n}"].double() for n in ("weight", "bias"))
    assert torch.allclose(gate.double(), h.double() @ weight[0] + bias, atol=1e-6)
    assert torch.allclose(logits.double(), h.double() @ model.weights["head"].double().t(), atol=1e-5)


def test_no_rows_are_no_work():
    """An engine step without a read-out calls the verbs with nothing."""
    model = tiny_model(dtype=torch.float32)
    assert model.readout(torch.zeros(0, 16)).shape == (0, 29)
    assert model.gate(torch.zeros(0, 16)).shape == (0,)


def test_a_tied_head_is_the_embedding_in_both_ways_of_reading_out():
    model = tiny_model(tied=True)
    assert "head" not in model.weights
    h = torch.randn(4, 16, dtype=torch.float64)
    assert torch.equal(model.readout(h), F.linear(h, model.weights["embed"]))
    assert torch.equal(model.readout(h, model.weights), model.readout(h))
    assert torch.equal(model.gate(h, model.weights), model.gate(h))


def test_a_tied_head_given_in_float32_keeps_its_gradient_in_float32():
    """By way of the bfloat16 embedding the gradient of the read-out would be rounded."""
    model = tiny_model(tied=True, dtype=torch.bfloat16)
    h = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    head = model.wide["head"].clone().requires_grad_()
    embed = model.weights["embed"].clone().requires_grad_()
    logits = model.readout(h, {"embed": embed, "head": head})
    assert torch.equal(logits, model.readout(h))
    logits.sin().sum().backward()
    assert embed.grad is None and head.grad.dtype == torch.float32
    assert not torch.equal(head.grad, head.grad.bfloat16().float())


def test_rows_of_different_loops_may_share_a_call():
    """The stack's weights know no loop: two half batches at loops 1 and 2 equal one mixed batch."""
    model = tiny_model()
    ids = torch.tensor(tokens(6))
    cos, sin = model.rotary(torch.arange(6), 5)

    def attend(layer, q, k, v):
        out = [attention(*(x[rows].transpose(0, 1)[None] for x in (q, k, v)), None, "sdpa")[0].transpose(0, 1)
               for rows in torch.arange(q.shape[0]).split(6)]
        return torch.cat(out)

    first = model.loop(model.embed(ids), cos, sin, attend)
    second = model.loop(first, cos, sin, attend)
    mixed = model.loop(torch.cat((model.embed(ids), first)), torch.cat((cos, cos)), torch.cat((sin, sin)), attend)
    assert torch.allclose(mixed, torch.cat((first, second)), atol=1e-13)
    assert torch.allclose(second, dense_forward(model, pack([ids.tolist()], model), 2)[1], atol=1e-13)


def test_the_digest_is_computed_again_only_after_a_write():
    """Hashing gigabytes for every cohort and update would cost more than they do."""
    model, hashed = tiny_model(dtype=torch.float32), []
    hash_of = model._hash
    model._hash = lambda: hashed.append(1) or hash_of()
    first = model.digest()
    assert model.digest() == first and len(hashed) == 1
    with torch.no_grad():
        model.weights["core.0.q"][0, 0] += 1
    assert model.digest() != first and len(hashed) == 2
    with torch.no_grad():
        model.weights["core.0.q"][0, 0] -= 1
    model.publish({name: weight.clone() for name, weight in model.weights.items()}, 1)
    model.digest()
    assert len(hashed) == 3
