"""Pre-training of the embedded base: loss, schedule, noise, reproducibility, and the shipped checkpoint."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from engine.sampler import Sampling
from models.checkpoint import load_model
from models.tokenizer import load_tokenizer
from rollout.calculator import SYMBOLS, Step, answer_text, build_tokenizer, parse, problems
from train import pretrain
from train.base_figures import respond
from train.pretrain import PretrainOptions, exit_weighted_loss, held_out_steps, noisy_answer, rate_ratio

BASE = Path(pretrain.__file__).parent.parent / "recipes" / "base"
GREEDY = Sampling(greedy=True)
SMALL = ["--steps", "2", "--noise-steps", "1", "--batch", "4", "--hidden", "16", "--intermediate", "24",
         "--heads", "2", "--layers", "1", "--loops", "2", "--samples", "1"]


@pytest.fixture
def tokenizer(tmp_path):
    build_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def small_batch(options: PretrainOptions) -> tuple:
    model = pretrain.new_model(options)
    weights = {name: weight.clone().requires_grad_() for name, weight in model.weights.items()}
    batch = pretrain.Batch(((0, 2, 11, 3, 15, 6, 0),), torch.tensor([4, 5]), torch.tensor([6, 0]))
    return model, weights, batch


def test_loss_weighs_each_loop_by_its_exit_probability():
    """T = 3, gates 1/2 and 1/4: p = 1/2, 1/8, 3/8 (the last loop takes the rest)."""
    gates = torch.tensor([[0.0], [-math.log(3)], [5.0]])
    loss, metrics = exit_weighted_loss(torch.tensor([[-2.0], [-4.0], [-8.0]]), gates, 0.0)
    assert loss.item() == pytest.approx(2 / 2 + 4 / 8 + 8 * 3 / 8)
    assert metrics["share"] == pytest.approx([1 / 2, 1 / 8, 3 / 8])
    assert metrics["ce"] == [2.0, 4.0, 8.0]


def test_entropy_lowers_the_loss():
    """p = 1/2, 1/2: H = ln 2, so the loss is CE - beta ln 2; means run over tokens."""
    gates = torch.zeros(2, 2)
    loss, metrics = exit_weighted_loss(torch.full((2, 2), -1.0), gates, 0.3)
    assert metrics["entropy"] == pytest.approx(math.log(2))
    assert loss.item() == pytest.approx(1 - 0.3 * math.log(2))


def test_gradient_of_the_gate_has_the_hand_worked_value():
    """T = 2: loss = s CE_1 + (1 - s) CE_2 - beta H(s), so d/dg = s (1 - s) (CE_1 - CE_2 + beta ln(s / (1 - s))).

    Within float32, the dtype of the exit distribution."""
    gate = torch.tensor([[1.0], [0.0]], dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor([[-3.0], [-1.0]], dtype=torch.float64)
    exit_weighted_loss(logprobs, gate, 0.5)[0].backward()
    share = 1 / (1 + math.exp(-1))
    assert gate.grad[0, 0].item() == pytest.approx(share * (1 - share) * (3 - 1 + 0.5 * 1.0), rel=1e-5)
    assert gate.grad[1, 0].item() == 0.0


def test_gradient_is_finite_where_the_gate_has_closed():
    """A saturated gate gives exit probabilities of exactly 0, whose logarithm is -inf."""
    gate = torch.tensor([[200.0], [200.0], [0.0]], requires_grad=True)
    exit_weighted_loss(torch.full((3, 1), -1.0), gate, 0.1)[0].backward()
    assert torch.isfinite(gate.grad).all()


def test_gradient_reaches_gate_head_and_every_shared_weight():
    options = PretrainOptions(hidden=16, intermediate=24, heads=2, layers=1, loops=3)
    model, weights, batch = small_batch(options)
    pretrain.batch_loss(model, weights, batch, options)[0].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights.values())


def test_learning_rate_warms_up_stays_and_falls():
    options = PretrainOptions(steps=100, warm_up=0.1, flat_until=0.5, last_ratio=0.2, noise_steps=4, noise_ratio=0.6)
    assert [rate_ratio(step, options) for step in (0, 4, 9, 10, 49)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    assert rate_ratio(74, options) == pytest.approx(0.6)
    assert rate_ratio(99, options) == pytest.approx(0.2)
    assert [rate_ratio(step, options) for step in range(100, 104)] == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert rate_ratio(0, PretrainOptions(warm_up=0.0, flat_until=0.0)) <= 1


def test_noise_changes_exactly_one_digit_and_keeps_the_end():
    draw = random.Random(0)
    found = {noisy_answer("570\n", draw) for _ in range(2000)}
    assert all(sum(a != b for a, b in zip(noisy, "570\n", strict=True)) == 1 for noisy in found)
    assert all(noisy[-1] == "\n" and noisy[:-1].isdecimal() for noisy in found)
    assert len(found) == 27  # 3 places, 9 other digits each


def test_noise_begins_after_the_clean_steps_and_spares_the_agreed_share(tokenizer):
    options = PretrainOptions(steps=5, batch=200, noise_share=0.6)
    wrong = []
    for step in (4, 5):
        batch = pretrain.make_batch(step, options, tokenizer, {})
        right = [tokenizer.encode(answer_text(p.c)) for p in problems(200, options.seed, {}, step * 200)]
        found = [list(tokens[tokens.index(15) + 1:]) for tokens in batch.sequences]
        wrong.append(sum(a != b for a, b in zip(right, found, strict=True)))
    assert wrong[0] == 0
    assert 90 <= wrong[1] <= 150  # 120 expected, standard deviation 7


def test_batch_predicts_answer_tokens_only_and_leaves_held_out_steps_out(tokenizer):
    options = PretrainOptions(batch=300, noise_share=0.0)
    held_out = dict.fromkeys(held_out_steps())
    batch = pretrain.make_batch(0, options, tokenizer, held_out)
    flat = [token for tokens in batch.sequences for token in tokens]
    assert [flat[row + 1] for row in batch.rows.tolist()] == batch.targets.tolist()
    answers = [tokens[tokens.index(15) + 1:] for tokens in batch.sequences]
    assert [token for answer in answers for token in answer] == batch.targets.tolist()
    prompts = {"".join(SYMBOLS[token] for token in tokens[1:tokens.index(15)]) for tokens in batch.sequences}
    assert not prompts & {f"{s.a}{s.op}{s.b}" for s in held_out}


def test_held_out_steps_are_read_as_calculations():
    steps = held_out_steps()
    assert len(steps) == 464
    assert all(s.c == {"+": s.a + s.b, "-": s.a - s.b, "*": s.a * s.b, "/": s.a // (s.b or 1)}[s.op] for s in steps)


def test_same_options_give_the_same_bits_and_a_loadable_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrain, "held_out_steps", lambda: held_out_steps()[:20])  # figures in less time
    for name in ("first", "second"):
        assert pretrain.main(["--out", str(tmp_path / name), *SMALL]) == 0
    printed = json.loads(capsys.readouterr().out.split("\n}\n")[0] + "\n}")
    first, second = load_model(tmp_path / "first"), load_model(tmp_path / "second")
    assert first.digest() == second.digest() == printed["digest"]
    assert printed == json.loads((tmp_path / "first" / "pretrain.json").read_text())
    assert load_tokenizer(tmp_path / "first").encode("\n1+2=") == [0, 2, 11, 3, 15]
    start = pretrain.new_model(PretrainOptions(hidden=16, intermediate=24, heads=2, layers=1, loops=2))
    assert not any(torch.equal(first.weights[name], weight) for name, weight in start.weights.items())


def test_a_folder_in_use_and_an_impossible_share_are_refused(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .* not empty"):
        pretrain.main(["--out", str(tmp_path), *SMALL])
    with pytest.raises(ValueError, match=r"noise_share = 1\.5"):
        PretrainOptions(noise_share=1.5)


def test_shipped_base_is_as_good_as_it_says():
    """Greedy accuracy on the first 100 held-out steps, loop T and loop 1, against the recorded figures of all
    464: within 4 standard deviations of the binomial, and loop T is far ahead."""
    assert (BASE / "model.safetensors").stat().st_size < 5_000_000
    record = json.loads((BASE / "pretrain.json").read_text())
    model, tokenizer = load_model(BASE), load_tokenizer(BASE)
    assert model.digest() == record["digest"]
    steps = random.Random(0).sample(held_out_steps(), 100)
    shares = {}
    for loop in (1, model.config.loops):
        texts, depths = respond(model, tokenizer, steps, GREEDY, loop)
        assert set(depths) == {loop}
        shares[loop] = sum(parse(text) == step.c for text, step in zip(texts, steps, strict=True)) / len(steps)
        said = record["figures"][f"greedy_loop_{loop}_accuracy"]
        assert abs(shares[loop] - said) <= 4 * math.sqrt(max(said * (1 - said), 0.01) / len(steps))
    assert shares[model.config.loops] - shares[1] > 0.3
    assert record["figures"]["sampled_gate_parsed"] >= 0.95
    assert 0.2 <= record["figures"]["sampled_gate_accuracy"] <= 0.4


def test_response_cut_at_its_length_is_no_answer(tokenizer):
    """Four digits without a newline must not count as the first three."""
    texts, _ = respond(always_seven(), tokenizer, [Step(1, "+", 1, 777)], GREEDY, 1)
    assert texts == ["7777"]
    assert parse(texts[0]) is None


def always_seven():
    """A model that writes the digit 7 (token 8) whatever it reads: all hidden states are ones, and so is that row
    of the head."""
    model = pretrain.new_model(PretrainOptions(hidden=16, intermediate=24, heads=2, layers=1, loops=1))
    weights = {name: torch.zeros_like(weight) for name, weight in model.weights.items()}
    weights["embed"] += 1
    weights["norm"] += 1
    weights["head"][8] = 1
    model.publish(weights, 0)
    return model
