"""`python -m train.bench --model DIR|synthetic:HIDDENxLAYERSxVOCAB`: what exactness costs in training.

Numerics `shapes` and `invariant` each have a model with the same weights, an engine and a learner
of their own, in one process. In every turn both do one training step of the same requests: a cohort
is rolled out by one mode and then by the other, its log is replayed by both, the learners follow; who
begins alternates. The learning rate is 0, so all turns have the same weights. Printed are medians
over turns, with the least and the most beside them:

rollout        seconds of the engine on all cohorts, without the log's header; over passes: ms/pass
alone          milliseconds of a pass itself: no head, no sampling, no scheduling
of the rule    invariant over shapes, in the same turn
replay         seconds to replay all cohorts over their rollout: pass by pass, and (invariant) packed
step           one training step by phase, and shares of the time of all turns in percent

Phases: rollout; log (its header with the digest of the weights, encoding, writing); replay (audited
cohorts, preparation of the batches); dense (training forwards and backwards); reduction (the tree
over cohorts); optimizer (norm, AdamW); publication (cast, packing); other (metrics). Every token has
an advantage of +1 or -1, so every micro-batch has a backward. Where no rule holds on this machine the
reason is printed and shapes is measured alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

import torch

from engine.engine import Engine
from engine.sampler import Sampling
from engine.schedule import parse_schedule
from models.cli import run_cli
from models.config import ModelConfig
from models.linear import KINDS
from models.numerics import configure
from models.synthetic import FORM
from rollout.bench import check_counts, machine
from rollout.bench_arms import Workload
from rollout.bench_model import make_models, model_config
from rollout.generate import choose_capacity
from train.bench_turns import PHASES, Job, Mode, cost_of_rule, result, run_turns
from train.config import DataOptions, LearnerOptions, ModelOptions, RolloutOptions, RunOptions, TrainConfig
from train.learner import Learner
from train.masters import Masters


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text. Whatever can be refused is, before weights are read."""
    options = parser().parse_args(argv)
    device = configure(threads=options.threads)
    config = model_config(options.model)
    job, settings = plan(options, config)
    before = machine(device)
    modes, refused = make_modes(options, config, job, settings, device)
    turns = run_turns(modes, job, options.turns)
    results = [result(mode.model, found) for mode, found in zip(modes, turns, strict=True)]
    rule = cost_of_rule(*turns) if len(turns) == 2 else None
    print("\n".join(table(results, rule)))
    command = shlex.join(["python", "-m", "train.bench", *(sys.argv[1:] if argv is None else argv)])
    print(json.dumps({"results": results, "rule": rule, "refused": refused, "model": options.model,
                      "schedule": options.schedule, "dtype": options.dtype, "cohorts": options.cohorts,
                      "turns": options.turns, "machine": before, "command": command}))
    return 0


def plan(options: argparse.Namespace, config: ModelConfig) -> tuple[Job, TrainConfig]:
    """What is measured, and the learner's settings. ValueError for what cannot be measured."""
    check_counts(options, config, {"prompts": 1, "group": 2, "prompt_tokens": 1, "new_tokens": 1, "turns": 1,
                                   "cohorts": 1})
    if options.prompts % options.cohorts:
        raise ValueError(f"--prompts {options.prompts} must be a multiple of --cohorts {options.cohorts}")
    sampling = Sampling(options.seed)
    settings = TrainConfig(
        model=ModelOptions(options.model, options.dtype), data=DataOptions(path="-", reward="-"),  # nothing reads it
        rollout=RolloutOptions(options.schedule, max_new_tokens=options.new_tokens, group_size=options.group,
                               prompts_per_step=options.prompts, cohorts=options.cohorts),
        learner=LearnerOptions(learning_rate=0.0), run=RunOptions(seed=options.seed, threads=options.threads))
    load = Workload(options.prompts, options.prompt_tokens, options.new_tokens, options.turns, sampling)
    prompts = tuple(request.prompt for request in load.requests(config.vocab))
    return Job(prompts, options.group, options.new_tokens, options.cohorts, sampling), settings


def make_modes(options: argparse.Namespace, config: ModelConfig, job: Job, settings: TrainConfig,
               device: torch.device) -> tuple[list[Mode], str | None]:
    """`shapes`, and `invariant` where it holds; where it does not, the line that says why."""
    requests = job.requests(1)[0]
    depth = parse_schedule(options.schedule, config.loops).max_depth
    capacity = choose_capacity(requests, depth, {"max_sequences": len(requests)})

    def make(numerics: str) -> tuple[Mode, str]:
        (model, line), = make_models(options.model, config, linear=options.linear, numerics=numerics,
                                     length=options.prompt_tokens + options.new_tokens, dtype=options.dtype,
                                     device=device, profile="hf")
        print(line, flush=True)
        learner = Learner(settings, model, Masters(model.weights), None)
        learner.publish()
        return Mode(Engine(model, options.schedule, capacity), learner), line

    best, line = make("auto")
    if best.model.rule is None:
        return [best], line
    return [make("shapes")[0], best], None


def table(results: Sequence[dict], rule: dict | None) -> list[str]:
    """The figures for a person."""
    lines = [f"{'numerics':<10} {'linear':<6} {'tokens':>6} {'depth':>5} {'passes':>7} {'rows/pass':>9} {'padded':>7} "
             f"{'rollout s':>9} {'least..most':>15} {'ms/pass':>8} {'alone':>8} {'replay: passes':>22} {'packed':>18}"]
    for row in results:
        lines.append(f"{row['numerics']:<10} {row['linear']:<6} {row['tokens']:>6} {row['mean_depth']:>5.2f} "
                     f"{row['passes']:>7.1f} {row['rows_per_pass']:>9.1f} {row['padded_rows_per_pass']:>7.1f} "
                     f"{row['rollout_s']:>9.3f} {_range(row, 'rollout_s', 3):>15} {row['ms_per_pass']:>8.2f} "
                     f"{row['alone_ms']:>8.2f} {_figure(row, 'passes_to_rollout'):>22} "
                     f"{_figure(row, 'packed_to_rollout'):>18}")
    if rule is not None:
        named = (("rollout", "rollout"), ("a pass", "pass"), ("a pass itself", "alone"))
        lines.append("cost of the rule: " + ", ".join(f"{text} {_figure(rule, name)}" for text, name in named))
    lines.append(f"{'step':<12}" + "".join(f" {row['numerics'] + ' s':>12} {'least..most':>15} {'%':>5}"
                                           for row in results))
    for at, phase in enumerate(PHASES):
        cells = (row["phases"][at] for row in results)
        lines.append(f"{phase:<12}" + "".join(f" {cell['s']:>12.4f} {_range(cell, 's', 4):>15} {cell['percent']:>5.1f}"
                                              for cell in cells))
    lines.append(f"{'whole':<12}" + "".join(f" {row['step_s']:>12.4f} {_range(row, 'step_s', 4):>15} {100:>5.1f}"
                                            for row in results))
    return lines


def _range(row: dict, name: str, digits: int) -> str:
    return f"{row[f'{name}_least']:.{digits}f}..{row[f'{name}_most']:.{digits}f}"


def _figure(row: dict, name: str) -> str:
    return "-" if row[name] is None else f"{row[name]:.2f} ({_range(row, name, 2)})"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m train.bench", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", required=True, metavar="DIR", help=f"model folder, or {FORM}: random weights of Ouro's form")
    add("--schedule", default="exit:gate=0.4", metavar="S", help="of the rollout (default: exit:gate=0.4)")
    add("--prompts", type=int, default=4, metavar="P", help="prompts of a training step (default: 4)")
    add("--group", type=int, default=8, metavar="G", help="samples of each prompt (default: 8)")
    add("--cohorts", type=int, default=4, metavar="C", help="engine runs, and leaves of the tree, that the prompts of "
        "a step are split into; one of them is audited (default: 4)")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens of each prompt (default: 32)")
    add("--new-tokens", type=int, default=32, metavar="N", help="tokens of each sample (default: 32)")
    add("--turns", type=int, default=5, metavar="N", help="measured turns; one more warms up (default: 5)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and cache (default: float32)")
    add("--linear", default="auto", choices=("auto", *KINDS), help="linear operator of both modes (default: auto)")
    add("--threads", type=int, default=1, help="CPU threads (default: 1)")
    add("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    return made


if __name__ == "__main__":
    run_cli(main)
