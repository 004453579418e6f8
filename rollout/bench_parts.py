"""How far `dense` is from its parts: its time a pass beside that of its operators alone.

The parts run at the shapes of decoding, in the same turns as dense, as often as dense runs them:

- linear: the products of a pass, all layers, of as many rows as there are sequences;
- attention: one query a sequence over contiguous keys and values of its length, all layers, with
  a plane of its own for each loop and layer, as the engine has;
- head: logits of one position a sequence, once a token.

No norms, no rotary embedding, no cache, no scheduling and no sampling: what is left out is what
the ratio shows.
"""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Callable

import torch

from models.attention import attention
from models.linear import linear
from models.looped import LoopedLM
from rollout.bench_arms import Workload, make_arms, rotated, run, turn_of


def measure_parts(model: LoopedLM, load: Workload) -> dict:
    """Milliseconds a pass of decoding, for dense and for its parts alone; medians over turns.

    `dense_ms` is the time from pass to pass (with read-outs, sampling, scheduling, records),
    `pass_ms` that of the passes themselves. `dense_to_parts` is dense over linear + attention +
    head, `pass_to_parts` pass over linear + attention, both within a turn. load.new is at least 2.
    """
    arm, = make_arms([model], ["dense"], load)
    parts = {"linear": _linear(model, load), "attention": _attention(model, load), "head": _head(model, load)}
    passes = (load.new - 1) * model.config.loops
    turns: list[dict[str, float]] = []
    for turn in range(-1, load.turns):  # the first one warms up
        seconds: dict[str, float] = {}
        for name in rotated(["dense", *parts], turn):
            if name == "dense":
                found = turn_of(run(arm.engine, load, turn))
                if found.decode_passes != passes:
                    raise AssertionError(f"dense decoded in {found.decode_passes} passes, its parts in {passes}")
                seconds |= {"dense": found.decode_seconds, "pass": found.decode_ran}
            else:
                seconds[name] = _timed(parts[name], load.synchronise)
        if turn >= 0:
            turns.append(seconds)
    return {"batch": load.batch, "linear": model.linear, "numerics": model.numerics, "passes": passes,
            "rows": load.batch, "keys": [load.prompt + 1, load.prompt + load.new - 1], **_figures(turns, passes)}


def _figures(turns: list[dict[str, float]], passes: int) -> dict:
    found = {f"{name}_ms": stats.median(turn[name] for turn in turns) * 1000 / passes for name in turns[0]}
    for ratio, whole, parts in (("dense_to_parts", "dense", ("linear", "attention", "head")),
                                ("pass_to_parts", "pass", ("linear", "attention"))):
        values = [turn[whole] / sum(turn[part] for part in parts) for turn in turns]
        found |= {ratio: stats.median(values), f"{ratio}_least": min(values), f"{ratio}_most": max(values)}
    return found


def _timed(part: Callable[[], None], synchronise: bool) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        part()
    if synchronise:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _linear(model: LoopedLM, load: Workload) -> Callable[[], None]:
    """Every product of the stack, in order; a product's input is random and stays in the cache, as
    it would after the operator before."""
    names = [name for name in model.weights if name.startswith("core.") and model.weights[name].dim() == 2]
    steps = [(model.weights[name], model.packed.get(name)) for name in names]
    inputs = {width: torch.randn(load.batch, width).to(model.device, model.dtype)
              for width in {weight.shape[1] for weight, _ in steps}}
    passes = (load.new - 1) * model.config.loops

    def part() -> None:
        for _ in range(passes):
            for weight, packed in steps:
                linear(inputs[weight.shape[1]], weight, packed)

    return part


def _attention(model: LoopedLM, load: Workload) -> Callable[[], None]:
    config, most = model.config, load.prompt + load.new - 1
    kind = {"dtype": model.dtype, "device": model.device}
    q = torch.randn(load.batch, config.heads, 1, config.head_dim).to(**kind)
    planes = [tuple(torch.randn(load.batch, config.kv_heads, most, config.head_dim, **kind) for _ in range(2))
              for _ in range(config.loops * config.layers)]

    def part() -> None:
        for keys in range(load.prompt + 1, most + 1):
            mask = torch.ones(load.batch, 1, 1, keys, dtype=torch.bool, device=model.device)
            for k, v in planes:
                attention(q, k[:, :, :keys], v[:, :, :keys], mask, model.kernel)

    return part


def _head(model: LoopedLM, load: Workload) -> Callable[[], None]:
    hidden = torch.randn(load.batch, model.config.hidden).to(model.device, model.dtype)

    def part() -> None:
        for _ in range(load.new - 1):
            model.readout(hidden)

    return part
