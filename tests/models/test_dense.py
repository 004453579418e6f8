"""The dense forward: against the plain reference, against itself in other packings, its gradient."""

import pytest
import torch
from plain_ouro import plain_ouro
from tiny_models import tiny_model, tokens

from models.dense import dense_forward, pack
from models.logprob import token_logprob
from models.ouro import tensor_names, to_json


def states(model, sequences, depth=None, **options):
    return dense_forward(model, pack(sequences, model), depth or model.config.loops, **options)


# ---- values ----

VARIANTS = {
    "grouped heads, odd head_dim": {},
    "plain heads": {"kv_heads": 4},
    "one kv head": {"kv_heads": 1},
    "head_dim = hidden / heads": {"head_dim": 4},
    "tied": {"tied": True},
    "one loop, one layer": {"loops": 1, "layers": 1},
    "five loops": {"loops": 5},
    "theta": {"rope_theta": 1e6},
    "eps": {"rms_eps": 0.05},
}


@pytest.mark.parametrize("profile", ["hf", "fused"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_equals_the_plain_reference(variant, profile):
    model = tiny_model(profile=profile, **VARIANTS[variant])
    ids = tokens(13)
    official = {official: model.weights[name] for name, official in tensor_names(model.config).items()}
    plain = plain_ouro(official, to_json(model.config), ids, torch.float64)
    found = states(model, [ids])
    assert len(found) == model.config.loops
    assert torch.allclose(torch.stack(found), plain["hidden"], atol=1e-12, rtol=0)
    for t, h in enumerate(found):
        assert torch.allclose(model.readout(h), plain["logits"][t], atol=1e-12, rtol=0)
        assert torch.allclose(model.gate(h), plain["gate_logit"][t], atol=1e-12, rtol=0)


@pytest.mark.parametrize("change", [{"rope_theta": 1e6}, {"rms_eps": 0.05}, {"loops": 2}],
                         ids=lambda c: next(iter(c)))
def test_each_constant_is_used(change):
    """So that the variants above cannot pass by ignoring it."""
    usual, other = (states(tiny_model(**c), [tokens(13)])[-1] for c in ({}, change))
    assert (usual - other).abs().max() > 0.01


@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_float32_error_against_float64(profile):
    """Three loops of two layers: float32's own noise, a few hundred units in the last place."""
    ids = tokens(40)
    exact, found = (states(tiny_model(dtype=d, profile=profile), [ids]) for d in (torch.float64, torch.float32))
    for e, f in zip(exact, found, strict=True):
        assert f.dtype == torch.float32
        assert (e - f.double()).abs().max() < 5e-5


@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_bfloat16_stays_near_float64(profile):
    """A coarse bound (states have size 1): it catches a region computed in the wrong order."""
    ids = tokens(40)
    exact, found = (states(tiny_model(dtype=d, profile=profile), [ids])[-1] for d in
                    (torch.float64, torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert (exact - found.double()).pow(2).mean().sqrt() < 0.05


# ---- packing ----


@pytest.mark.parametrize("lengths", [(1, 2, 3), (7, 7, 7), (1, 33, 5, 8, 9, 40, 2)])
def test_packed_sequences_equal_single_ones(lengths):
    """Neither neighbours nor padding nor place enter; positions start at 0 for each sequence."""
    model = tiny_model()
    sequences = [tokens(n, seed=i) for i, n in enumerate(lengths)]
    together = states(model, sequences)
    start = 0
    for sequence in sequences:
        alone = states(model, [sequence])
        for whole, part in zip(together, alone, strict=True):
            assert torch.allclose(whole[start:start + len(sequence)], part, atol=1e-12, rtol=0)
        start += len(sequence)
    assert start == together[0].shape[0]


def test_packing_by_hand():
    """Lengths 1 | 3, 4 | 6 fall into padded groups of 1, 4 and 6; rows are never padded."""
    packed = pack([[5], [1, 2, 3], [9, 8, 7, 6], [4] * 6], tiny_model())
    assert packed.ids.tolist() == [5, 1, 2, 3, 9, 8, 7, 6, 4, 4, 4, 4, 4, 4]
    assert packed.positions.tolist() == [0, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert packed.starts == (0, 1, 4, 8, 14)
    assert [(rows.tolist(), slots.tolist(), count, size) for rows, slots, count, size, _ in packed.groups] == [
        ([0], [0], 1, 1),
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7], 2, 4),
        ([8, 9, 10, 11, 12, 13], [0, 1, 2, 3, 4, 5], 1, 6)]


def test_a_shallower_forward_is_the_beginning_of_the_full_one():
    model = tiny_model(dtype=torch.float32)
    full, first = states(model, [tokens(9)]), states(model, [tokens(9)], depth=2)
    assert len(first) == 2 and all(torch.equal(a, b) for a, b in zip(first, full, strict=False))


def test_later_tokens_do_not_reach_earlier_rows():
    model, ids = tiny_model(), tokens(12)
    changed = [*ids[:8], *((t + 1) % 29 for t in ids[8:])]
    for a, b in zip(states(model, [ids]), states(model, [changed]), strict=True):
        assert torch.equal(a[:8], b[:8])
        assert (a[8:] - b[8:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("sequences", [[], [[1, 2], []]])
def test_nothing_to_pack_is_refused(sequences):
    with pytest.raises(ValueError, match="none may be empty"):
        pack(sequences, tiny_model())


def test_too_long_or_too_deep_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"65 tokens, more than max_positions = 64"):
        states(model, [[1] * 65])
    states(model, [[1] * 64], depth=1)
    for depth in (0, 4):
        with pytest.raises(ValueError, match=rf"depth = {depth} must be in 1\.\.3"):
            dense_forward(model, pack([[1]], model), depth)


# ---- gradient ----

SEQUENCES = [tokens(5, seed=1), tokens(9, seed=2), tokens(6, seed=3)]
DEPTHS = torch.tensor([1, 3, 2, 3] * 5)


def objective(model, leaves, recompute=False, calls=None):
    """Sum of weighted log-probs read out at mixed depths, and of gate logits at every loop."""
    def weights():
        own = leaves
        if calls is not None:
            own = {name: w.detach().requires_grad_() for name, w in leaves.items()}
            calls.append(own)
        return own

    found = torch.stack(states(model, SEQUENCES, weights=weights, recompute=recompute))
    chosen = found[DEPTHS - 1, torch.arange(20)]
    ids = (torch.arange(20) * 7) % 29
    logp = token_logprob(model.readout(chosen, leaves), ids, 0.8)
    gates = torch.stack([model.gate(h, leaves) for h in found])
    return (logp * torch.linspace(-1, 2, 20)).sum() + 0.1 * gates.sin().sum()


def leaves_of(model):
    return {name: w.clone().requires_grad_() for name, w in model.weights.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_gradient_by_finite_differences(profile, tied):
    """Every tensor, along a direction of its own, in float64."""
    model = tiny_model(profile=profile, tied=tied)
    leaves = leaves_of(model)
    objective(model, leaves).backward()
    step, generator = 1e-6, torch.Generator().manual_seed(5)
    for name, leaf in leaves.items():
        way = torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            up, down = (objective(model, leaves | {name: leaf + s * way}) for s in (step, -step))
        slope, expected = ((up - down) / (2 * step)).item(), (leaf.grad * way).sum().item()
        assert abs(slope) > 1e-4, f"{name} does not matter to the objective"
        assert slope == pytest.approx(expected, rel=2e-6, abs=1e-7), name


def test_the_gradient_of_a_tied_embedding_counts_both_uses_once():
    """Equal to an untied clone's embedding and head gradients summed by hand, not twice it."""
    tied, untied = tiny_model(tied=True), tiny_model()
    for name in untied.weights:
        untied.weights[name].copy_(tied.weights["embed" if name == "head" else name])
    grads = []
    for model in (tied, untied):
        leaves = leaves_of(model)
        objective(model, leaves).backward()
        grads.append({name: leaf.grad for name, leaf in leaves.items()})
    both = grads[1]["embed"] + grads[1]["head"]
    assert both.abs().max() > 0.1
    assert torch.allclose(grads[0]["embed"], both, atol=1e-12)
    for name in grads[0].keys() - {"embed"}:
        assert torch.allclose(grads[0][name], grads[1][name], atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_recomputing_a_loop_leaves_every_gradient_bit_alone(dtype, profile):
    model = tiny_model(dtype=dtype, profile=profile)
    grads = []
    for recompute in (False, True):
        leaves = leaves_of(model)
        value = objective(model, leaves, recompute)
        value.backward()
        grads.append({"": value, **{name: leaf.grad for name, leaf in leaves.items()}})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_asked_for_once_by_the_embedding_and_once_by_each_loop(recompute):
    """So a learner can add up a shared weight's gradient loop by loop, in float32."""
    model, calls = tiny_model(), []
    leaves = leaves_of(model)
    objective(model, leaves, recompute, calls).backward()
    assert len(calls) == 1 + model.config.loops
    whole = leaves_of(model)
    objective(model, whole).backward()
    for name in ("core.0.q", "core.1.down", "norm", "core.1.norm_mlp_out"):
        assert calls[0][name].grad is None, "the embedding uses no loop weight"
        assert all(call[name].grad is not None for call in calls[1:])
        assert torch.allclose(sum(call[name].grad for call in calls[1:]), whole[name].grad, atol=1e-12), name
    assert torch.allclose(calls[0]["embed"].grad, whole["embed"].grad, atol=1e-12)


def test_the_value_with_a_graph_is_the_value_without():
    model = tiny_model(dtype=torch.float32)
    leaves = leaves_of(model)
    with torch.no_grad():
        plain = states(model, SEQUENCES)
    for graph, value in zip(states(model, SEQUENCES, weights=lambda: leaves), plain, strict=True):
        assert graph.requires_grad and torch.equal(graph, value)


def test_the_compute_copy_builds_no_graph():
    assert not states(tiny_model(), [tokens(3)])[-1].requires_grad


def test_float32_weights_may_run_through_a_bfloat16_model():
    """dense_dtype = float32: the graph's dtype is that of the weights it is given."""
    model = tiny_model(dtype=torch.bfloat16)
    wide = {name: w.float() for name, w in model.weights.items()}
    found = states(model, [tokens(9)], weights=lambda: wide)[-1]
    assert found.dtype == torch.float32
    assert torch.allclose(found, states(tiny_model(dtype=torch.float32), [tokens(9)])[-1], atol=2e-5)
    assert model.readout(found, wide).dtype == model.gate(found, wide).dtype == torch.float32
