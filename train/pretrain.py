"""`python -m train.pretrain --out DIR`: the tiny Ouro of the embedded task, from random weights.

Trains on made-up arithmetic (`rollout.calculator.problems`, never a held-out step). The loss
weighs the cross-entropy of each loop by the exit distribution and rewards that distribution's
entropy, so that the gate learns how deep a token needs to go and no loop is abandoned.

After that comes the noise phase, in which most answers have one wrong digit. The model keeps its
skill (its most likely answer mostly stays right) but learns to be unsure, so sampled answers are
mostly wrong. That is on purpose, and the reason why RL on this base gains much: RL mainly takes
the noise out again.

Same options, same bits, on one kind of machine with one thread. Schedules count steps, never time.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from models import ouro
from models.checkpoint import save_model
from models.cli import run_cli
from models.dense import dense_forward, pack
from models.exits import exit_distribution
from models.initial import init_model
from models.logprob import token_logprob
from models.looped import LoopedLM
from models.numerics import configure
from models.tokenizer import Tokenizer, load_tokenizer
from rollout.calculator import SYMBOLS, Step, answer_text, build_tokenizer, problems, prompt_text
from rollout.data import load_data
from train.base_figures import evaluate_base

HELD_OUT = Path(__file__).parent.parent / "rollout" / "embedded" / "calculator" / "test.jsonl"
GATE_BIAS = -1.0  # with weight 0: exit probabilities .27 .20 .14 .39, every loop is trained
SMALLEST = 1e-9  # exit probabilities below it give no entropy gradient (log 0)


@dataclass(frozen=True)
class PretrainOptions:
    """One pre-training run; each field is an option of the command.

    Attributes:
        steps: optimizer steps on right answers. batch: problems a step. seed: of weights,
            problems and noise.
        hidden, intermediate, heads, layers, loops: sizes of the model.
        entropy_weight: beta of the loss.
        muon_rate: peak learning rate of the layers' matrices (Muon).
        adamw_rate: peak learning rate of embedding, head, norms and gate (AdamW).
        warm_up, flat_until: shares of `steps` at which the rate is at its peak and begins to fall.
        last_ratio: share of the peak that the rate falls to, linearly, in both phases.
        noise_steps: optimizer steps of the noise phase, which follows.
        noise_ratio: share of the peak rate that the noise phase begins with.
        noise_share: share of its answers that get one wrong digit.
        samples: of each held-out step, for the figures. threshold: of the gate, for the same.
    """

    steps: int = 1300
    batch: int = 64
    seed: int = 0
    hidden: int = 160
    intermediate: int = 432
    heads: int = 5
    layers: int = 2
    loops: int = 4
    entropy_weight: float = 0.08
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    warm_up: float = 0.02
    flat_until: float = 0.3
    last_ratio: float = 0.02
    noise_steps: int = 200
    noise_ratio: float = 0.2
    noise_share: float = 0.6
    samples: int = 8
    threshold: float = 0.4

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.noise_steps < 0:
            raise ValueError(f"noise_steps = {self.noise_steps}: must be at least 0")
        for name in ("warm_up", "flat_until", "last_ratio", "noise_ratio", "noise_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: is a share, give 0 to 1")
        if self.warm_up > self.flat_until:
            raise ValueError(f"warm_up = {self.warm_up}: must not be above flat_until = {self.flat_until}")
        for name in ("muon_rate", "adamw_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0 and finite")


@dataclass(frozen=True)
class Batch:
    """Problems as token sequences.

    sequences: token ids, prompt and answer. rows: int64 [N], the packed rows that predict an
    answer token. targets: int64 [N], those tokens.
    """

    sequences: tuple[tuple[int, ...], ...]
    rows: Tensor
    targets: Tensor


def exit_weighted_loss(logprobs: Tensor, gate_logits: Tensor, entropy_weight: float) -> tuple[Tensor, dict]:
    """Mean over tokens of sum_t p_t CE_t - entropy_weight * H(p), p the exit distribution.

    logprobs: [T, N] log-probabilities of the N target tokens read out at each loop.
    gate_logits: [T, N] at the same rows; gradients reach both. Returns the loss and metrics:
    `ce` and `share`, per-loop means as lists, and `entropy` in nats.
    """
    shares = exit_distribution(gate_logits).T
    entropy = -(shares * shares.clamp_min(SMALLEST).log()).sum(0).mean()
    loss = -(shares * logprobs).sum(0).mean() - entropy_weight * entropy
    return loss, {"ce": (-logprobs.detach()).mean(1).tolist(), "share": shares.detach().mean(1).tolist(),
                  "entropy": entropy.item()}


def rate_ratio(step: int, options: PretrainOptions) -> float:
    """Share of the peak learning rate at step 0, 1, ...: warm-up, flat, linear fall; in the noise phase a
    second fall from `noise_ratio`."""
    if step >= options.steps:
        first, done = options.noise_ratio, (step + 1 - options.steps) / options.noise_steps
        return first + (options.last_ratio - first) * done
    done = (step + 1) / options.steps
    if done <= options.warm_up:
        return done / options.warm_up
    if done <= options.flat_until:
        return 1.0
    return 1 - (1 - options.last_ratio) * (done - options.flat_until) / (1 - options.flat_until)


def noisy_answer(answer: str, draw: random.Random) -> str:
    """`answer` with one digit replaced by another; the newline at its end stays."""
    place = draw.randrange(len(answer) - 1)
    digit = draw.choice([d for d in "0123456789" if d != answer[place]])
    return answer[:place] + digit + answer[place + 1:]


def make_batch(step: int, options: PretrainOptions, tokenizer: Tokenizer, held_out: Mapping[Step, None]) -> Batch:
    """The problems of one step, a pure function of options and step."""
    draw = random.Random(f"noise {options.seed} {step}")
    noisy = step >= options.steps
    sequences, rows, targets, at = [], [], [], 0
    for problem in problems(options.batch, options.seed, held_out, step * options.batch):
        answer = answer_text(problem.c)
        if noisy and draw.random() < options.noise_share:
            answer = noisy_answer(answer, draw)
        prompt = tokenizer.encode(prompt_text(problem.a, problem.op, problem.b))
        response = tokenizer.encode(answer)
        sequences.append((*prompt, *response))
        rows += range(at + len(prompt) - 1, at + len(prompt) + len(response) - 1)
        targets += response
        at += len(prompt) + len(response)
    return Batch(tuple(sequences), torch.tensor(rows), torch.tensor(targets))


def batch_loss(model: LoopedLM, weights: Mapping[str, Tensor], batch: Batch, options: PretrainOptions,
               ) -> tuple[Tensor, dict]:
    """`exit_weighted_loss` of a batch, with a graph that leads to `weights`."""
    packed = pack(batch.sequences, model)
    states = [state[batch.rows] for state in dense_forward(model, packed, model.config.loops, weights=lambda: weights)]
    logprobs = torch.stack([token_logprob(model.readout(state, weights), batch.targets, 1.0) for state in states])
    gates = torch.stack([model.gate(state, weights) for state in states])
    return exit_weighted_loss(logprobs, gates, options.entropy_weight)


def new_model(options: PretrainOptions) -> LoopedLM:
    """Random weights and a near-uniform gate."""
    source = ouro.new_source(hidden=options.hidden, intermediate=options.intermediate, layers=options.layers,
                             heads=options.heads, vocab=len(SYMBOLS), loops=options.loops, max_positions=64,
                             rope_theta=1e4)
    model = init_model(ouro.parse(source | {"early_exit_threshold": options.threshold}), seed=options.seed)
    gate = {"exit_gate.weight": torch.zeros_like(model.weights["exit_gate.weight"]),
            "exit_gate.bias": torch.full_like(model.weights["exit_gate.bias"], GATE_BIAS)}
    model.publish(model.weights | gate, 0)
    return model


def train(model: LoopedLM, options: PretrainOptions, tokenizer: Tokenizer, held_out: Mapping[Step, None]) -> None:
    """Run all steps and publish the trained weights to `model`. Progress bar on stderr."""
    from tqdm import tqdm

    weights = {name: weight.clone().requires_grad_() for name, weight in model.weights.items()}
    matrices = [w for name, w in weights.items() if name.startswith("core.") and w.dim() == 2]
    others = [w for name, w in weights.items() if not (name.startswith("core.") and w.dim() == 2)]
    optimizers = [(torch.optim.Muon(matrices, options.muon_rate, weight_decay=0.0, momentum=0.95), options.muon_rate),
                  (torch.optim.AdamW(others, options.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0),
                   options.adamw_rate)]
    total = options.steps + options.noise_steps
    for step in tqdm(range(total), unit="step", file=sys.stderr):
        loss, metrics = batch_loss(model, weights, make_batch(step, options, tokenizer, held_out), options)
        if not bool(torch.isfinite(loss)):
            raise RuntimeError(f"pre-training: the loss is {loss.item()} at step {step}; lower muon_rate or adamw_rate")
        loss.backward()
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate_ratio(step, options)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 in (options.steps, total):
            tqdm.write(f"step {step + 1}: loss {loss.item():.3f}, by loop: cross-entropy "
                       f"{_list(metrics['ce'])}, exit share {_list(metrics['share'])}", file=sys.stderr)
    model.publish({name: weight.detach() for name, weight in weights.items()}, 0)


def held_out_steps() -> list[Step]:
    """The embedded steps that neither pre-training nor RL ever sees, in the order of the file."""
    steps = []
    for example in load_data(HELD_OUT).examples:
        op = next(symbol for symbol in "+-*/" if symbol in example.prompt)
        a, b = example.prompt.rstrip("=").split(op)
        steps.append(Step(int(a), op, int(b), int(example.answer)))
    return steps


def main(argv: Sequence[str] | None = None) -> int:
    """Train, save, measure on the held-out steps; the figures go to stdout and `pretrain.json`."""
    parser = argparse.ArgumentParser(prog="python -m train.pretrain", description="Pre-train the embedded base model.")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="of torch; other bits with other numbers (default 1)")
    for field in fields(PretrainOptions):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default,
                            metavar="X", help=f"default {field.default}")
    given = vars(parser.parse_args(argv))
    out, threads = Path(given.pop("out")), given.pop("threads")
    options = PretrainOptions(**given)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists and is not empty; name a new folder")
    configure(threads=threads)
    files = out.parent / f".{out.name}.tokenizer"
    build_tokenizer(files)
    tokenizer, steps, model = load_tokenizer(files), held_out_steps(), new_model(options)
    clocks = time.perf_counter(), time.process_time()
    train(model, options, tokenizer, dict.fromkeys(steps))
    spent = {"seconds": round(time.perf_counter() - clocks[0], 1),
             "cpu_seconds": round(time.process_time() - clocks[1], 1)}
    figures = evaluate_base(model, tokenizer, steps, samples=options.samples, seed=options.seed,
                            threshold=options.threshold)
    save_model(model, out, source=files)
    for file in files.iterdir():
        file.unlink()
    files.rmdir()
    command = shlex.join(["python", "-m", "train.pretrain", *(sys.argv[1:] if argv is None else argv)])
    record = {"command": command, "options": asdict(options), "threads": threads, "torch": torch.__version__,
              "parameters": sum(w.numel() for w in model.weights.values()), "digest": model.digest(), **spent,
              "figures": figures}
    text = json.dumps(record, indent=2) + "\n"
    (out / "pretrain.json").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    run_cli(main)
