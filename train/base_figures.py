"""What a base model can do before RL: accuracy by read-out depth, share of answers that parse, gate.

Slow and obvious on purpose: every token is a full dense forward over whole sequences, without
cache or schedule. Problems are about a dozen tokens long. Random numbers are keyed as in the
engine, so every figure is a pure function of weights, steps and seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from engine.sampler import Sampling, sample
from models.dense import dense_forward, pack
from models.exits import exit_cdf, exit_distribution, exit_loop
from models.looped import LoopedLM
from models.tokenizer import Tokenizer
from rollout.calculator import Step, parse, prompt_text
from rollout.data import uid

THRESHOLDS = (0.3, 0.4, 0.5, 0.6)
MAX_NEW_TOKENS = 4  # three digits and the newline
STOP = 0  # token id of the newline


def evaluate_base(model: LoopedLM, tokenizer: Tokenizer, steps: Sequence[Step], *, samples: int, seed: int,
                  threshold: float) -> dict:
    """Figures of a base model on calculator steps, as plain numbers for a JSON file.

    samples: at temperature 1, of each step, read out at loop T and at the gate's exit depth at
    `threshold`. Greedy figures: at every loop, and at the gate's depth for each of THRESHOLDS.
    """
    loops = model.config.loops
    figures: dict = {"steps": len(steps), "samples": samples}
    sampling = Sampling(seed=seed)
    for name, read in (("sampled_last_loop", loops), ("sampled_gate", threshold)):
        texts, _ = respond(model, tokenizer, [s for s in steps for _ in range(samples)], sampling, read)
        wanted = [s.c for s in steps for _ in range(samples)]
        figures[f"{name}_parsed"] = _share(parse(text) is not None for text in texts)
        figures[f"{name}_accuracy"] = _accuracy(texts, wanted)
    wanted = [s.c for s in steps]
    greedy = Sampling(seed=seed, greedy=True)
    for loop in range(1, loops + 1):
        texts, _ = respond(model, tokenizer, steps, greedy, loop)
        figures[f"greedy_loop_{loop}_accuracy"] = _accuracy(texts, wanted)
    figures["greedy_last_loop_by_operator"] = {
        op: _accuracy([t for t, s in zip(texts, steps, strict=True) if s.op == op], [s.c for s in steps if s.op == op])
        for op in "+-*/" if any(s.op == op for s in steps)}
    figures["gate"] = {}
    for value in THRESHOLDS:
        texts, depths = respond(model, tokenizer, steps, greedy, value)
        counts = Counter(depths)
        figures["gate"][str(value)] = {
            "greedy_accuracy": _accuracy(texts, wanted), "mean_depth": round(sum(depths) / len(depths), 4),
            "depth_shares": [round(counts[loop] / len(depths), 4) for loop in range(1, loops + 1)]}
    return figures


@torch.no_grad()
def respond(model: LoopedLM, tokenizer: Tokenizer, steps: Sequence[Step], sampling: Sampling,
            read: int | float) -> tuple[list[str], list[int]]:
    """One response a step, and the exit depth of every response token in no useful order.

    read: an int is the loop that all tokens are read out at, a float the gate's threshold.
    A response cut at MAX_NEW_TOKENS has four symbols and no newline, which `parse` refuses.
    """
    sequences = [tokenizer.encode(prompt_text(s.a, s.op, s.b)) for s in steps]
    prompts = [len(sequence) for sequence in sequences]
    seen: Counter = Counter()
    uids = []
    for step in steps:  # the n-th time a step occurs is its n-th sample
        uids.append(uid(0, "base", f"{step.a}{step.op}{step.b}", seen[step]))
        seen[step] += 1
    going, depths = list(range(len(steps))), []
    for _ in range(MAX_NEW_TOKENS):
        packed = pack([sequences[i] for i in going], model)
        last = torch.tensor(packed.starts[1:], device=model.device) - 1
        hidden, chosen = _read_rows(model, packed, last, read)
        ids, _ = sample(model.readout(hidden), sampling, [uids[i] for i in going],
                        [len(sequences[i]) - 1 for i in going])
        depths += chosen
        for place, token in zip(going, ids.tolist(), strict=True):
            sequences[place].append(token)
        going = [i for i in going if sequences[i][-1] != STOP]
        if not going:
            break
    symbols = [tokenizer.backend.decode(s[n:], skip_special_tokens=False)
               for s, n in zip(sequences, prompts, strict=True)]
    return symbols, depths


def _read_rows(model: LoopedLM, packed, rows: torch.Tensor, read: int | float) -> tuple[torch.Tensor, list[int]]:
    """Hidden states [N, H] of `rows` [N] at their exit depth, and the depths."""
    if isinstance(read, int):
        return dense_forward(model, packed, read)[-1][rows], [read] * len(rows)
    states = torch.stack([state[rows] for state in dense_forward(model, packed, model.config.loops)])
    gates = torch.stack([model.gate(state) for state in states])
    depth = exit_loop(exit_cdf(exit_distribution(gates)), read)
    return states[depth - 1, torch.arange(len(rows), device=rows.device)], depth.tolist()


def _accuracy(texts: Sequence[str], wanted: Sequence[int]) -> float:
    return _share(parse(text) == c for text, c in zip(texts, wanted, strict=True))


def _share(hits) -> float:
    found = list(hits)
    return round(sum(found) / len(found), 4)
