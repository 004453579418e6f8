"""`python -m train.gpu_check --out DIR`: what a machine does with the promises, in one short run.

Parts: environment; replay = rollout bits for dense and exit schedules in float32 and
bfloat16; whether numerics `invariant` hold; one training step run twice with equal hash; a
short bench. Each part is a process of its own with a time limit, so that one that hangs or
dies leaves the others' results.
Needs torch, numpy, safetensors, tokenizers, accelerate, tensorboard, tqdm and matplotlib only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from engine import Capacity, Engine, Request, Sampling
from engine.plan import Pass
from models import ouro
from models.cli import run_cli
from models.files import replacing
from models.initial import init_model
from models.invariance import set_numerics
from models.looped import LoopedLM
from models.numerics import configure, fingerprint

SCHEDULES = ("dense", "exit:2", "exit:gate=0.5", "exit:periodic=2,4", "exit:mix=2:60,3:25,4:15")
DTYPES = ("float32", "bfloat16")
TURNS = 5
SECONDS = {"environment": 60, "replay": 150, "invariant": 90, "training": 120, "bench": 150}


def make_model(dtype: str, device: torch.device, profile: str = "hf") -> LoopedLM:
    """A random Ouro; small on a CPU, wide enough on a GPU for its kernels to matter."""
    small = device.type == "cpu"
    source = ouro.new_source(hidden=32 if small else 1024, intermediate=80 if small else 2816,
                             layers=2 if small else 4, heads=2 if small else 8,
                             vocab=256 if small else 8192, loops=4)
    return init_model(ouro.parse(source), seed=7, dtype=dtype, device=device, profile=profile)


def make_requests(model: LoopedLM, count: int, new_tokens: int) -> list[Request]:
    """Prompts of differing lengths with fixed ids; fewer and shorter on a CPU."""
    vocab = model.config.vocab
    if model.device.type == "cpu":
        count, new_tokens = min(count, 6), new_tokens // 3
    return [Request(tuple((7 * i + 13 * j) % vocab for j in range(3 + 5 * i % 23)), new_tokens,
                    uid=1000 + i) for i in range(count)]


def environment(device: torch.device) -> dict:
    """Versions and settings that decide bits."""
    return {"python": sys.version.split()[0], **fingerprint(device)}


def replay_bits(device: torch.device) -> dict:
    """Mismatched log-prob bits of replay against rollout for each schedule, dtype and profile."""
    from rollout.log import decode, encode, from_rollout
    from rollout.structure import check_structure
    from train.replay import mismatches, recorded, replay

    cells = []
    for dtype in DTYPES:
        for profile in ("hf", "fused"):
            model = make_model(dtype, device, profile)
            for schedule in SCHEDULES:
                engine = Engine(model, schedule, Capacity(max_sequences=6, max_rows=48, max_span=16))
                log = decode(encode(from_rollout(engine.generate(
                    make_requests(model, 10, 24), Sampling(seed=5, temperature=0.9)))))
                check_structure(log)
                wrong = mismatches(replay(model, log), recorded(log))
                cells.append({"dtype": dtype, "profile": profile, "schedule": schedule,
                              "tokens": log.token_count, "mismatched": len(wrong)})
    return {"cells": cells, "ok": not any(cell["mismatched"] for cell in cells)}


def invariant_bits(device: torch.device) -> dict:
    """Whether numerics `invariant` hold here, and the tokens at which a dense forward then has other bits."""
    from rollout.log import from_rollout
    from train.replay import mismatches, recorded, replay_packed

    cells = []
    for dtype in DTYPES:
        for profile in ("hf", "fused"):
            model = make_model(dtype, device, profile)
            cell = {"dtype": dtype, "profile": profile, "numerics": set_numerics(model, "auto", length=300)}
            if model.rule is not None:
                log = from_rollout(Engine(model, "exit:periodic=2,4", Capacity(max_sequences=6, max_span=16)).generate(
                    make_requests(model, 10, 24), Sampling(seed=5)))
                cell |= {"tokens": log.token_count,
                         "mismatched": len(mismatches(replay_packed(model, log), recorded(log)))}
            cells.append(cell)
    return {"cells": cells, "ok": not any(cell.get("mismatched") for cell in cells)}


def training_twice(device: torch.device) -> dict:
    """Digest of the weights after two training steps, twice, in each dtype."""
    digests = {dtype: [_train(dtype, device) for _ in range(2)] for dtype in DTYPES}
    return {"digests": digests, "ok": all(first == second for first, second in digests.values())}


def _train(dtype: str, device: torch.device) -> str:
    from rollout.log import from_rollout
    from train.config import (
        DataOptions,
        LearnerOptions,
        ModelOptions,
        RolloutOptions,
        TrainConfig,
    )
    from train.learner import Batch, Learner
    from train.masters import Masters

    model = make_model(dtype, device)
    config = TrainConfig(
        model=ModelOptions(path="random", dtype=dtype), data=DataOptions(path="-", reward="-"),
        rollout=RolloutOptions(group_size=4, prompts_per_step=2, cohorts=2),
        learner=LearnerOptions(learning_rate=1e-3, replay="always"))
    learner = Learner(config, model, Masters(make_model("float32", device).weights), None)
    learner.publish()
    for step in (1, 2):
        batches = []
        for cohort in range(2):
            requests = [dataclasses.replace(r, uid=r.uid + 100 * cohort + 1000 * step)
                        for r in make_requests(model, 4, 16)]
            log = from_rollout(Engine(model, "exit:gate=0.5").generate(requests, Sampling(seed=step)))
            batches.append(Batch(cohort, log, (1.0, -1.0, 0.5, -0.5), (True,) * 4))
        learner.step(batches, step)
    return model.digest()


def bench(device: torch.device) -> dict:
    """Tokens per second of each schedule and its ratio to dense: interleaved, medians of TURNS."""
    results = []
    for dtype in DTYPES:
        model = make_model(dtype, device)
        requests = make_requests(model, 16, 32)
        rates: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        passes = {}
        for turn in range(TURNS + 1):
            for schedule in SCHEDULES:
                began = time.perf_counter()
                rollout = Engine(model, schedule).generate(requests, Sampling(seed=turn))
                if device.type == "cuda":
                    torch.cuda.synchronize()
                tokens = sum(len(c.token_ids) for c in rollout.completions)
                if turn:  # the first turn warms up
                    rates[schedule].append(tokens / (time.perf_counter() - began))
                passes[schedule] = sum(isinstance(e, Pass) for e in rollout.events)
        dense = statistics.median(rates["dense"])
        results += [{"dtype": dtype, "schedule": schedule, "batch": len(requests),
                     "tokens_per_s": statistics.median(found), "least": min(found), "most": max(found),
                     "ratio_to_dense": statistics.median(found) / dense, "passes": passes[schedule]}
                    for schedule, found in rates.items()]
    return {"results": results, "ok": True}


PARTS = {"environment": environment, "replay": replay_bits, "invariant": invariant_bits,
         "training": training_twice, "bench": bench}


def run_part(name: str, arguments: argparse.Namespace) -> dict:
    """Run one part in a process of its own; what went wrong is its result."""
    command = [sys.executable, "-m", "train.gpu_check", "--out", arguments.out, "--device",
               arguments.device, "--part", name]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True,
                              timeout=SECONDS[name] * arguments.time_scale)
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 else {
            "ok": False, "error": done.stderr[-2000:] or f"exit status {done.returncode}"}
    except subprocess.TimeoutExpired as error:
        found = {"ok": False, "error": f"no result within {error.timeout:.0f} s"}
    return found | {"seconds": time.perf_counter() - began}


def main(argv: list[str] | None = None) -> int:
    """Run all parts; status 0 only if every one is ok."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu-check", help="folder for gpu-check.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor on every time limit")
    parser.add_argument("--part", choices=PARTS, help="run only this part, in this process")
    arguments = parser.parse_args(argv)
    if arguments.part:
        device = configure(device=arguments.device)
        print(json.dumps(PARTS[arguments.part](device) | {"part": arguments.part}))
        return 0
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in PARTS:
        results[name] = run_part(name, arguments)
        with replacing(folder / "gpu-check.json") as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        verdict = results[name].get("error") or ("ok" if results[name].get("ok", True) else "FAILED")
        print(f"{name}: {verdict} ({results[name]['seconds']:.1f} s)", flush=True)
    good = all(found.get("ok", True) and "error" not in found for found in results.values())
    print(json.dumps({"ok": good, "device": arguments.device, "file": str(folder / "gpu-check.json")}))
    return 0 if good else 1


if __name__ == "__main__":
    run_cli(main)
