"""`python -m rollout.bench`: rollout throughput of schedules, honestly compared.

Arms are interleaved in one process and reported as medians with their spread; the ratio to
dense is the median of ratios within a turn, so that a slow moment of the machine hits both
arms. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
import time

import torch

from engine.engine import Engine, Request, Rollout
from engine.plan import Capacity
from engine.sampler import Sampling
from models import ouro
from models.checkpoint import load_model
from models.cli import run_cli
from models.initial import init_model
from models.looped import LoopedLM
from models.numerics import configure, fingerprint
from rollout.statistics import statistics

SCHEDULES = ("dense", "exit:2", "exit:periodic=2,4", "exit:mix=2:60,3:25,4:15")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print a table and one line of JSON."""
    arguments = parse(argv)
    device = configure(threads=arguments.threads, device=arguments.device)
    model = bench_model(arguments, device)
    results = []
    print(f"{'schedule':<28} {'batch':>5} {'tokens/s':>9} {'spread':>15} {'to dense':>8} "
          f"{'passes/token':>12} {'rows/pass':>9}")
    for batch in arguments.batch:
        for row in measure(model, batch, arguments):
            results.append(row)
            spread = f"{row['tokens_per_s_least']:.0f}..{row['tokens_per_s_most']:.0f}"
            print(f"{row['schedule']:<28} {batch:>5} {row['tokens_per_s']:>9.1f} {spread:>15} "
                  f"{row['ratio_to_dense']:>8.2f} {row['passes_per_token']:>12.2f} "
                  f"{row['rows_per_pass']:>9.1f}", flush=True)
    print(json.dumps({"results": results, "model": arguments.model, "dtype": arguments.dtype,
                      "machine": fingerprint(device)}))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder, or synthetic:HIDDENxLAYERSxVOCAB")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="S")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], metavar="B")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5, help="measured turns (one more warms up)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--profile", default="hf", choices=("hf", "fused"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    for name in ("prompt_tokens", "new_tokens", "turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(arguments.batch) < 1:
        parser.error("--batch takes numbers of at least 1")
    return arguments


def bench_model(arguments: argparse.Namespace, device: torch.device) -> LoopedLM:
    """A model folder, or random weights of Ouro geometry (heads of 64 or wider, T = 4)."""
    kind, _, sizes = arguments.model.partition(":")
    options = {"dtype": arguments.dtype, "device": device, "profile": arguments.profile}
    if kind != "synthetic":
        return load_model(arguments.model, **options)
    parts = sizes.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--model {arguments.model!r}: write synthetic:HIDDENxLAYERSxVOCAB, for "
                         "example synthetic:1024x8x4096")
    hidden, layers, vocab = map(int, parts)
    if hidden % 64:
        raise ValueError(f"--model {arguments.model!r}: HIDDEN must be a multiple of 64")
    source = ouro.new_source(hidden=hidden, intermediate=-(-hidden * 11 // 4 // 16) * 16,
                             layers=layers, heads=hidden // 64, vocab=vocab, loops=4)
    return init_model(ouro.parse(source), seed=0, **options)


def measure(model: LoopedLM, batch: int, arguments: argparse.Namespace) -> list[dict]:
    """One row of figures a schedule at one batch size."""
    prompt, new = arguments.prompt_tokens, arguments.new_tokens
    pages = batch * model.config.loops * -(-(prompt + new) // 16)
    capacity = Capacity(max_sequences=batch, max_rows=max(256, batch), max_span=64, pages=pages)
    requests = [Request(tuple((31 * i + 17 * j) % model.config.vocab for j in range(prompt)), new,
                        uid=i) for i in range(batch)]
    engines = {schedule: Engine(model, schedule, capacity) for schedule in arguments.schedules}
    timed: dict[str, list[float]] = {schedule: [] for schedule in engines}
    last: dict[str, Rollout] = {}
    for turn in range(arguments.turns + 1):
        for schedule, engine in engines.items():
            seconds, last[schedule] = _timed(engine, requests, turn)
            if turn:
                timed[schedule].append(seconds)
    base = timed.get("dense") or next(iter(timed.values()))
    return [_row(schedule, batch, last[schedule], timed[schedule], base) for schedule in engines]


def _timed(engine: Engine, requests: list[Request], seed: int) -> tuple[float, Rollout]:
    """Wall seconds of a run, and the run (its tokens are on the host, so the device is done)."""
    began = time.perf_counter()
    rollout = engine.generate(requests, Sampling(seed=seed))
    return time.perf_counter() - began, rollout


def _row(schedule: str, batch: int, rollout: Rollout, timed: list[float],
         base: list[float]) -> dict:
    counted = statistics(rollout)
    rates = sorted(counted.tokens / seconds for seconds in timed)
    ratios = [dense / seconds for seconds, dense in zip(timed, base, strict=True)]
    return {"schedule": schedule, "batch": batch, "tokens_per_s": stats.median(rates),
            "tokens_per_s_least": rates[0], "tokens_per_s_most": rates[-1],
            "ratio_to_dense": stats.median(ratios), "passes_per_token": counted.passes_per_token,
            "rows_per_pass": counted.rows_per_pass, "catch_up_rows": counted.catch_up_rows}


if __name__ == "__main__":
    run_cli(main)
