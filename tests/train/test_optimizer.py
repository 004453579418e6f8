import math

import pytest
import torch

from train.config import DataOptions, LearnerOptions, ModelOptions, RunOptions, TrainConfig
from train.optimizer import ALIGNMENT, FlatAdamW, FlatLayout, learning_rate
from train.reduction import squared_norm

SHAPES = {"embed": (7, 5), "norm": (5,), "core.q": (3, 11), "scalar": (), "core.norm": (11,)}
UNDECAYED = {"norm", "core.norm"}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer(clip_norm=math.inf, seed=0):
    layout = FlatLayout.build(SHAPES, UNDECAYED)
    return layout, FlatAdamW(layout.flatten(values(seed)), layout.decayed, clip_norm=clip_norm, **ADAM)


def bits(tensor):
    return tensor.detach().clone().view(torch.int32)


def test_layout_by_hand():
    """Decayed first: 35 elements take 48, 33 take 48, a scalar takes 16; then 5 and 11 take 16 each."""
    layout = FlatLayout.build(SHAPES, UNDECAYED)
    assert layout.names == ("embed", "core.q", "scalar", "norm", "core.norm")
    assert layout.offsets == (0, 48, 96, 112, 128) and (layout.decayed, layout.size) == (112, 144)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)


def test_views_are_the_vector_and_gaps_are_zero():
    layout = FlatLayout.build(SHAPES, UNDECAYED)
    flat = layout.flatten(values(1))
    assert all(torch.equal(view, values(1)[name]) for name, view in layout.views(flat).items())
    for view in layout.views(flat).values():
        assert view.data_ptr() % 64 == flat.data_ptr() % 64
        view.fill_(1.0)
    assert flat.sum() == 35 + 33 + 1 + 5 + 11
    halves = layout.flatten({name: tensor.bfloat16() for name, tensor in values(1).items()})
    assert halves.dtype == torch.float32


def test_layout_refuses_what_it_does_not_hold():
    layout = FlatLayout.build(SHAPES, UNDECAYED)
    with pytest.raises(AssertionError, match="extra"):
        layout.flatten({**values(0), "extra": torch.zeros(1)})
    with pytest.raises(AssertionError, match="layout of 144"):
        layout.views(torch.zeros(143))
    with pytest.raises(AssertionError, match="nrom"):
        FlatLayout.build(SHAPES, {"nrom"})


def test_bits_of_adamw_on_separate_parameters():
    layout, flat = optimizer()
    separate = {name: torch.nn.Parameter(tensor) for name, tensor in values(0).items()}
    decayed = [separate[name] for name in SHAPES if name not in UNDECAYED]
    rest = [separate[name] for name in SHAPES if name in UNDECAYED]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.0, foreach=False, fused=False, **ADAM)
    for step in range(1, 6):
        lr = 1e-2 / step
        for name, tensor in values(step).items():
            separate[name].grad = tensor
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        report = flat.step(layout.flatten(values(step)), lr)
        assert report.moments_updated and report.scale == 1.0
    for name, view in layout.views(flat.master).items():
        assert torch.equal(bits(view), bits(separate[name])), name
    assert flat.updates == 5
    gaps = flat.master.clone()
    for view in layout.views(gaps).values():
        view.zero_()
    assert not gaps.any()


def test_first_step_by_hand():
    """Bias-corrected moments of the first step are g and g^2, so a parameter moves by lr * sign(g);
    before that the decayed one is multiplied by 1 - lr * weight_decay."""
    master = torch.tensor([1.0, 1.0])
    adam = FlatAdamW(master, 1, betas=(0.9, 0.95), eps=0.0, weight_decay=0.1, clip_norm=math.inf)
    report = adam.step(torch.tensor([0.5, -0.25]), 0.1)
    assert master.tolist() == pytest.approx([0.99 - 0.1, 1.0 + 0.1], abs=1e-7)
    assert report.gradient_norm == math.sqrt(0.3125)
    assert adam.state()["exp_avg"].tolist() == pytest.approx([0.05, -0.025])
    assert adam.state()["exp_avg_sq"].tolist() == pytest.approx([0.0125, 0.003125])


@pytest.mark.parametrize("decayed", [0, 2])
def test_one_half_may_be_empty(decayed):
    master = torch.ones(2)
    FlatAdamW(master, decayed, betas=(0.9, 0.95), eps=0.0, weight_decay=0.5, clip_norm=1.0).step(torch.ones(2), 0.1)
    assert master.tolist() == pytest.approx([0.95 - 0.1 if decayed else 1 - 0.1] * 2)


@pytest.mark.parametrize("cut", [16, 112, 128])
def test_slices_give_the_bits_of_the_whole(cut):
    layout, whole = optimizer()
    start = layout.flatten(values(0))
    first = FlatAdamW(start[:cut].clone(), min(cut, layout.decayed), clip_norm=math.inf, **ADAM)
    second = FlatAdamW(start[cut:].clone(), max(0, layout.decayed - cut), clip_norm=math.inf, **ADAM)
    for step in range(1, 5):
        gradient = layout.flatten(values(step))
        first.step(gradient[:cut].clone(), 1e-2)
        second.step(gradient[cut:].clone(), 1e-2)
        whole.step(gradient, 1e-2)
    assert torch.equal(bits(torch.cat([first.master, second.master])), bits(whole.master))


def test_clipping_by_hand():
    """Norm 5 against 1: every element is multiplied by 0.2 rounded to float32, once."""
    gradient = torch.tensor([3.0, 4.0])
    adam = FlatAdamW(torch.zeros(2), 2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)
    report = adam.step(gradient, 0.1)
    scale = torch.tensor(0.2, dtype=torch.float32)
    assert (report.gradient_norm, report.scale) == (5.0, scale.item())
    assert torch.equal(gradient, torch.tensor([3.0, 4.0]) * scale)
    assert adam.state()["exp_avg"].tolist() == pytest.approx([0.06, 0.08])
    assert math.sqrt(squared_norm(gradient)) == pytest.approx(1.0, rel=1e-7)


def test_a_norm_at_the_limit_is_not_clipped():
    gradient = torch.tensor([3.0, 4.0])
    adam = FlatAdamW(torch.zeros(2), 2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=5.0)
    assert adam.step(gradient, 0.1).scale == 1.0 and gradient.tolist() == [3.0, 4.0]


def test_a_zero_gradient_only_decays():
    """Stale moments would move the weights although no token had an advantage."""
    layout, adam = optimizer()
    adam.step(layout.flatten(values(1)), 1e-2)
    before = {name: tensor.clone() for name, tensor in adam.state().items()}
    master = adam.master.clone()
    report = adam.step(torch.zeros(layout.size), 1e-2)
    assert report.gradient_norm == 0.0 and not report.moments_updated
    expected = master.clone()
    expected[: layout.decayed] *= 1 - 1e-2 * 0.1
    assert torch.equal(bits(adam.master), bits(expected)) and not torch.equal(adam.master, master)
    assert torch.equal(adam.master[layout.decayed :], master[layout.decayed :])
    after = adam.state()
    assert (before["updates"], after["updates"]) == (1, 2)
    assert all(torch.equal(before[name], after[name]) for name in ("exp_avg", "exp_avg_sq", "moment_steps"))


def test_the_smallest_gradient_is_not_zero():
    """Its square underflows in float32."""
    adam = FlatAdamW(torch.zeros(2), 2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)
    assert adam.step(torch.tensor([1e-45, 0.0]), 0.1).moments_updated


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stops_before_anything_moves(bad):
    layout, adam = optimizer(clip_norm=1.0)
    adam.step(layout.flatten(values(1)), 1e-2)
    before, master = {name: tensor.clone() for name, tensor in adam.state().items()}, adam.master.clone()
    gradient = layout.flatten(values(2))
    gradient[3] = bad
    with pytest.raises(RuntimeError, match="update 2"):
        adam.step(gradient, 1e-2)
    assert torch.equal(adam.master, master)
    assert all(torch.equal(tensor, adam.state()[name]) for name, tensor in before.items())


def test_learning_rate_zero_leaves_the_master_bit_for_bit():
    layout, adam = optimizer()
    before = bits(adam.master)
    adam.step(layout.flatten(values(1)), 0.0)
    assert torch.equal(bits(adam.master), before)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_resumed_equals_uninterrupted(stop):
    """Moments, bias correction and count come back from tensors alone, also behind a zero gradient."""
    gradients = [values(1), values(2), {n: torch.zeros(s) for n, s in SHAPES.items()}, values(3), values(4)]
    layout, whole = optimizer(clip_norm=5.0)
    first, second = optimizer(clip_norm=5.0)[1], optimizer(clip_norm=5.0, seed=9)[1]
    for index, gradient in enumerate(gradients):
        whole.step(layout.flatten(gradient), 1e-2)
        if index < stop:
            first.step(layout.flatten(gradient), 1e-2)
    second.step(layout.flatten(values(8)), 1.0)
    second.master.copy_(first.master)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for gradient in gradients[stop:]:
        second.step(layout.flatten(gradient), 1e-2)
    assert torch.equal(bits(second.master), bits(whole.master)) and second.updates == whole.updates == 5
    assert all(torch.equal(tensor, whole.state()[name]) for name, tensor in second.state().items())


def test_state_of_another_optimizer_is_refused():
    _, adam = optimizer()
    state = adam.state()
    with pytest.raises(RuntimeError, match="exp_avg_sq"):
        adam.load_state({**state, "exp_avg_sq": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="moment_steps"):
        adam.load_state({**state, "moment_steps": torch.tensor(1)})
    with pytest.raises(RuntimeError, match="holds"):
        adam.load_state({name: tensor for name, tensor in state.items() if name != "updates"})


def rates(steps, **learner):
    config = TrainConfig(
        model=ModelOptions(path="m"),
        data=DataOptions(task="t"),
        learner=LearnerOptions(learning_rate=0.8, **learner),
        run=RunOptions(steps=steps),
    )
    return [learning_rate(step, config) for step in range(1, steps + 1)]


def test_warm_up_and_constant_by_hand():
    assert rates(4) == [0.8] * 4
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_by_hand():
    assert rates(4, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(6, schedule="linear", warmup_steps=2, min_ratio=0.5) == pytest.approx([0.4, 0.8, 0.8, 0.7, 0.6, 0.5])


def test_cosine_by_hand():
    """Halfway between full rate and the end at half of the horizon."""
    assert rates(4, schedule="cosine") == pytest.approx(
        [0.8, 0.4 * (1 + math.sqrt(0.5)), 0.4, 0.4 * (1 - math.sqrt(0.5))]
    )
    assert rates(4, schedule="cosine", min_ratio=0.5)[2] == pytest.approx(0.6)


def test_behind_the_horizon_the_rate_stays_at_its_end():
    assert rates(5, schedule="linear", schedule_steps=2, min_ratio=0.25) == pytest.approx([0.8, 0.5, 0.2, 0.2, 0.2])
    assert rates(3, schedule="linear", warmup_steps=3, schedule_steps=3) == pytest.approx([0.8 / 3, 1.6 / 3, 0.8])


def test_the_plain_loop_is_used():
    """The fused kernel rounds differently; on a few dozen elements that may not show."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4096, generator=generator)
    flat = FlatAdamW(start.clone(), 4096, clip_norm=math.inf, **ADAM)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=1e-2, foreach=False, fused=False, **ADAM)
    for _ in range(10):
        parameter.grad = torch.randn(4096, generator=generator)
        reference.step()
        flat.step(parameter.grad.clone(), 1e-2)
    assert torch.equal(bits(flat.master), bits(parameter))
