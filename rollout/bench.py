"""`python -m rollout.bench --model DIR|synthetic:HIDDENxLAYERSxVOCAB`: throughput of schedules.

All arms (each schedule, on each linear operator measured) run in one process, in turns whose order
changes. Printed are medians over turns, with the least and the most beside them:

tokens/s       response tokens over the time of the whole engine run, prompts included
decode         the same after the pass that read out the last sequence's first token
to dense       tokens/s over those of dense in the same turn, dense on its fastest linear operator
               (* marks a schedule's slower ones)
passes/token   passes that a sequence takes part in, for one of its tokens
rows/pass      rows that share one read of the weights
catch-up       share of the rows that ran older cells for a newer position; peak: most in one span
gathered       share of the keys that attention read as a copy, not where they lie
outside        share of the time outside passes, of which: scheduling, sampling, read-out (head), log
               (header, encoding); the rest is the start of the run

--parts compares dense with its linear layers and its attention alone. Under torchrun each rank
runs its own copy at the same time, and rates are added up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.sampler import Sampling
from engine.schedule import parse_schedule
from models.cli import run_cli
from models.config import ModelConfig
from models.invariance import MODES
from models.linear import KINDS
from models.looped import LoopedLM
from models.numerics import configure, fingerprint
from models.rounding import PROFILES
from models.synthetic import FORM
from rollout.bench_arms import Workload, make_arms, rows, run_turns
from rollout.bench_model import Agreement, agreement, make_models, model_config
from rollout.bench_parts import measure_parts
from rollout.bench_plot import check_png, plot
from rollout.bench_ranks import Ranks, ranks_of_job

SCHEDULES = ("dense", "exit:2", "exit:periodic=2,4", "exit:mix=2:60,3:25,4:15")
BATCHES = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text. Whatever can be refused is, before weights are read."""
    options = parser().parse_args(argv)
    with ranks_of_job() as ranks:
        device = configure(threads=options.threads, device=_own_device(options.device, ranks))
        config = model_config(options.model)
        loads = workloads(options, config, device, ranks)
        schedules = list(options.schedules or SCHEDULES)
        if "dense" not in schedules:
            schedules.insert(0, "dense")
        before = machine(device)
        models = _models(options, config, device, ranks)
        if options.parts:
            found = parts_report(models, loads)
        else:
            found = arms_report(models, schedules, loads, ranks)
        if ranks.rank == 0:
            if options.png:
                plot(found["results"], f"{options.model}, {options.dtype}", options.png)
            command = shlex.join(["python", "-m", "rollout.bench", *(sys.argv[1:] if argv is None else argv)])
            print(json.dumps({**found, "model": options.model, "dtype": options.dtype, "profile": options.profile,
                              "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens,
                              "turns": options.turns, "ranks": ranks.size, "machine": before, "command": command}))
    return 0


def workloads(options: argparse.Namespace, config: ModelConfig, device: torch.device, ranks: Ranks) -> list[Workload]:
    """What is generated at each batch size. ValueError for a setting that cannot be measured."""
    check_counts(options, config, {"prompt_tokens": 1, "new_tokens": 2 if options.parts else 1, "turns": 1})
    if min(options.batch) < 1:
        raise ValueError(f"--batch {min(options.batch)} must be at least 1")
    for schedule in options.schedules or ():
        parse_schedule(schedule, config.loops)
    if options.synchronise and device.type != "cuda":
        raise ValueError(f"--synchronise: there is nothing to wait for on {device.type}; leave it out")
    if options.parts:
        _check_parts(options, ranks)
    if options.png is not None:
        check_png(options.png)
    greedy = options.temperature == 0
    first = Sampling(options.seed, 1.0 if greedy else options.temperature, greedy)
    found = [Workload(batch, options.prompt_tokens, options.new_tokens, options.turns, first, options.synchronise)
             for batch in options.batch]
    found[0].sampling_of(options.turns - 1)  # its seed must still be one
    return found


def check_counts(options: argparse.Namespace, config: ModelConfig, least: Mapping[str, int]) -> None:
    """ValueError where an option lies below the least that it can be, or a sequence would not fit the model."""
    for name, value in least.items():
        if getattr(options, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {value}")
    if options.prompt_tokens + options.new_tokens > config.max_positions:
        raise ValueError(f"--prompt-tokens {options.prompt_tokens} + --new-tokens {options.new_tokens} exceed the "
                         f"model's {config.max_positions} positions; lower one of them")


def _check_parts(options: argparse.Namespace, ranks: Ranks) -> None:
    for name, given in (("--schedules", options.schedules is not None), ("--png", options.png is not None)):
        if given:
            raise ValueError(f"{name}: --parts measures dense alone and draws nothing; leave {name} out")
    if ranks.size > 1:
        raise ValueError(f"--parts: measures one process, and torchrun started {ranks.size}; run it without torchrun")


def _own_device(name: str, ranks: Ranks) -> str:
    """`cuda` is a GPU of its own for each rank of a machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" and ranks.size > 1 else name


def _models(options: argparse.Namespace, config: ModelConfig, device: torch.device, ranks: Ranks) -> list[LoopedLM]:
    """The models to measure, told on stdout; RuntimeError when ranks would measure different ones."""
    made = make_models(options.model, config, linear=options.linear, numerics=options.numerics,
                       length=options.prompt_tokens + options.new_tokens, dtype=options.dtype, device=device,
                       profile=options.profile)
    lines = [line for _, line in made]
    told = ranks.gather(lines)
    if told is not None:
        other = next((rank for rank, found in enumerate(told) if found != told[0]), None)
        if other is not None:
            raise RuntimeError(f"rank {other} would measure {'; '.join(told[other])} and rank 0 {'; '.join(lines)}: "
                               "name --linear and --numerics")
        print("\n".join(lines), flush=True)
    return [model for model, _ in made]


def arms_report(models: Sequence[LoopedLM], schedules: Sequence[str], loads: Sequence[Workload],
                ranks: Ranks) -> dict:
    """Measure and print every batch size; the results, and how far loops agree on dense's text."""
    results, texts = [], []
    if ranks.rank == 0:
        print(HEADING)
    for load in loads:
        arms = make_arms(models, schedules, load)
        turns, last = run_turns(arms, load, ranks)
        by_rank = ranks.gather(turns)
        if by_rank is None:
            continue
        found = rows(arms, load, by_rank)
        results += found
        print("\n".join(map(line, found)), flush=True)
        if len(last.completions) > len(texts):
            texts = last.completions
    if ranks.rank:
        return {}
    found = agreement(models[0], texts)
    print(agreement_line(found))
    return {"results": results, "agreement": list(found.shares), "agreement_tokens": found.tokens,
            "entropy": found.entropy}


HEADING = (f"{'schedule':<26} {'batch':>5} {'linear':<7} {'tokens/s':>9} {'least..most':>16} {'decode':>9} "
           f"{'to dense':>8} {'least..most':>11} {'passes/token':>12} {'rows/pass':>9} {'catch-up':>8} {'peak':>4} "
           f"{'gathered':>8} {'outside':>7} {'sched':>6} {'sample':>6} {'head':>6} {'log':>6}")


def line(row: dict) -> str:
    """One row of the table; * marks a slower operator of a schedule."""
    mark = "" if row["fastest"] else "*"
    rate = f"{row['tokens_per_s_least']:.1f}..{row['tokens_per_s_most']:.1f}"
    ratio = f"{row['ratio_to_dense_least']:.2f}..{row['ratio_to_dense_most']:.2f}"
    decode = row["decode_tokens_per_s"]
    shares = "".join(f" {row['shares'][name]:>6.1%}" for name in ("scheduling", "sampling", "head", "log"))
    return (f"{row['schedule']:<26} {row['batch']:>5} {row['linear'] + mark:<7} {row['tokens_per_s']:>9.1f} {rate:>16} "
            f"{'-' if decode is None else format(decode, '.1f'):>9} {row['ratio_to_dense']:>8.2f} {ratio:>11} "
            f"{row['passes_per_token']:>12.2f} {row['rows_per_pass']:>9.1f} {row['catch_up_share']:>8.1%} "
            f"{row['peak_catch_up']:>4} {row['gathered_share']:>8.1%} {row['outside_share']:>7.1%}{shares}")


def agreement_line(found: Agreement) -> str:
    """What the loops know of each other, in a sentence."""
    shares = ", ".join(f"{share:.1%} at loop {loop}" for loop, share in enumerate(found.shares, 1))
    return (f"most likely token equal to that of loop {len(found.shares) + 1}: {shares}; entropy {found.entropy:.2f} "
            f"nats ({found.tokens} positions of dense's text)")


def parts_report(models: Sequence[LoopedLM], loads: Sequence[Workload]) -> dict:
    """Measure and print dense beside its parts."""
    found = []
    print(f"{'batch':>5} {'linear':<6} {'dense ms':>8} {'pass ms':>8} {'linear':>8} {'attention':>9} {'head':>8} "
          f"{'dense/parts':>11} {'least..most':>11} {'pass/parts':>10} {'least..most':>11}   (ms a pass of decoding)")
    for load in loads:
        for model in models:
            part = measure_parts(model, load)
            found.append(part)
            spreads = [f"{part[f'{name}_least']:.2f}..{part[f'{name}_most']:.2f}"
                       for name in ("dense_to_parts", "pass_to_parts")]
            print(f"{load.batch:>5} {model.linear:<6} {part['dense_ms']:>8.2f} {part['pass_ms']:>8.2f} "
                  f"{part['linear_ms']:>8.2f} {part['attention_ms']:>9.2f} {part['head_ms']:>8.2f} "
                  f"{part['dense_to_parts']:>11.2f} {spreads[0]:>11} {part['pass_to_parts']:>10.2f} {spreads[1]:>11}",
                  flush=True)
    return {"parts": found}


def machine(device: torch.device) -> dict:
    """What the figures depend on besides the command: bits' fingerprint, processor, other load."""
    names = [row.partition(":")[2].strip() for row in _proc("cpuinfo") if row.startswith("model name")]
    return {**fingerprint(device), "processor": names[0] if names else "", "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2)}


def _proc(name: str) -> list[str]:
    try:
        return Path("/proc", name).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m rollout.bench", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", required=True, metavar="DIR", help=f"model folder, or {FORM}: random weights of Ouro's form")
    add("--schedules", nargs="+", metavar="S", help="schedules to compare; one may stand twice, and dense is added "
        f"where it is missing (default: {' '.join(SCHEDULES)})")
    add("--batch", nargs="+", type=int, default=list(BATCHES), metavar="B", help="sequences at once, of each rank "
        f"(default: {' '.join(map(str, BATCHES))})")
    add("--prompt-tokens", type=int, default=32, metavar="P", help="tokens of each prompt (default: 32)")
    add("--new-tokens", type=int, default=32, metavar="N", help="tokens of each response (default: 32)")
    add("--turns", type=int, default=7, metavar="N", help="measured turns; one more warms up (default: 7)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and cache (default: float32)")
    add("--profile", default=PROFILES[0], choices=PROFILES, help=f"rounding profile (default: {PROFILES[0]})")
    add("--numerics", default="auto", choices=MODES, help="how replay keeps its bits (default: auto)")
    add("--linear", default="auto", choices=("auto", *KINDS, "each"), help="linear operator of all arms; each: every "
        "arm on every one, and ratios between the fastest ones (default: auto)")
    add("--parts", action="store_true", help="dense beside its linear layers and its attention, measured alone")
    add("--temperature", type=float, default=1.0, metavar="X", help="0: the most likely token (default: 1)")
    add("--seed", type=int, default=0, help="of the first turn; each turn takes the next one (default: 0)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--threads", type=int, default=1, help="CPU threads of each rank (default: 1)")
    add("--synchronise", action="store_true", help="cuda: wait for the device after each phase, for honest shares of "
        "the time and somewhat lower rates")
    add("--png", metavar="FILE", help="draw tokens/s and the ratio to dense by batch size")
    return made


if __name__ == "__main__":
    run_cli(main)
