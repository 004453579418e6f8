"""`python -m train.demo`: the embedded default from end to end, with the figures before and after.

Evaluates the shipped base, trains it by GRPO under a gate schedule, evaluates again under the
same random numbers, replays the last logs, and draws a schedule. Leaves everything in the
run folder.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from engine.engine import Engine
from models.cli import run_cli
from models.looped import LoopedLM
from rollout.draw import draw
from rollout.log import ScheduleLog, read_log, write_log
from rollout.samples import write_rows
from train.config import TrainConfig
from train.config_file import load
from train.evaluation import Evaluation, evaluate
from train.replay import mismatches, recorded, replay
from train.rollouts import cohort_folder
from train.run import build, build_rollouts, say

CHECKOUT = Path(__file__).resolve().parents[1]
SAMPLES = 4  # of each held-out problem in the sampled evaluations


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Status 0 only if every replayed bit agrees."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", help="run folder (default: runs/demo, or the next free runs/demo-N)")
    parser.add_argument("--problems", type=int, help="held-out problems to evaluate on (default: all)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="settings of recipes/demo.toml to change, for example run.seed=1")
    arguments = parser.parse_intermixed_args(argv)  # settings may stand on both sides of an option
    began = time.perf_counter()
    folder = Path(arguments.dir) if arguments.dir else next_free(Path("runs/demo"))
    config = load(CHECKOUT / "recipes/demo.toml",
                  [f"model.path={CHECKOUT / 'recipes/base'}", f"run.dir={folder}", *arguments.overrides])
    trainer = build(config)
    model = trainer.learner.model
    say(f"before training ({config.model.path}):")
    before = evaluations(config, model, arguments.problems)
    say(f"training {config.run.steps} steps under {config.rollout.schedule}:")
    trainer.run()
    if trainer.stop.received is not None:  # saved and said so; who asked to stop does not wait for figures
        return 0
    say("after training:")
    after = evaluations(config, model, arguments.problems)
    bits = check_bits(trainer, after)
    show(before, after, bits)
    drawn = folder / "schedule.png"
    log = last_log(trainer)
    draw(log, drawn, sequences=range(0, len(log.completions), config.rollout.group_size)[:5])
    for name, result in after.items():
        write_rows(result.rows, folder / "eval" / f"after-{name.replace(' ', '-')}.jsonl")
    report = {"before": {name: e.summary for name, e in before.items()},
              "after": {name: e.summary for name, e in after.items()}, "bits": bits,
              "seconds": time.perf_counter() - began}
    (folder / "demo.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say(f"in {folder}: curves.png, schedule.png, samples.jsonl, metrics.jsonl, tensorboard/, logs/, "
        f"checkpoints/, demo.json ({report['seconds']:.0f} s)")
    return 0 if bits["mismatched"] == 0 else 1


def next_free(folder: Path) -> Path:
    """`folder`, or folder-2, folder-3, ... where it is already in use."""
    number, found = 1, folder
    while found.exists() and any(found.iterdir()):
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def evaluations(config: TrainConfig, model: LoopedLM, problems: int | None) -> dict[str, Evaluation]:
    """Held-out accuracy: sampled and greedy, under the training schedule and under dense."""
    found = {}
    for schedule in (config.rollout.schedule, "dense"):
        options = replace(config.rollout, schedule=schedule)
        arm = replace(config, rollout=options, data=replace(config.data, split=config.data.eval_split))
        rollouts, stream, _ = build_rollouts(arm, model)
        engine: Engine = rollouts.engine
        label = "dense" if schedule == "dense" else "gate"
        for greedy in (False, True):
            name = f"{label} {'greedy' if greedy else 'sampled'}"
            found[name] = evaluate(
                engine, stream, replace(rollouts.sampling, greedy=greedy), rollouts.reward,
                rollouts.decode, max_new_tokens=options.max_new_tokens,
                samples=1 if greedy else SAMPLES, limit=problems)
            summary = found[name].summary
            say(f"  {name}: {summary['accuracy']:.3f} "
                f"[{summary['accuracy_low']:.3f}, {summary['accuracy_high']:.3f}]")
    return found


def check_bits(trainer, after: dict[str, Evaluation]) -> dict:
    """Replay the final evaluations under the final weights and compare every bit."""
    tokens = wrong = 0
    for name, result in after.items():
        log = result.cohort.log
        tokens += log.token_count
        wrong += len(mismatches(replay(trainer.learner.model, log), recorded(log)))
        target = Path(trainer.config.run.dir) / "eval" / f"after-{name.replace(' ', '-')}.log"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_log(log, target)
    return {"replayed_tokens": tokens, "mismatched": wrong}


def last_log(trainer) -> ScheduleLog:
    """Log of the first cohort of the last step."""
    config = trainer.config
    return read_log(cohort_folder(Path(config.run.dir) / "logs", trainer.state.step, 0) / "schedule.log")


def show(before: dict[str, Evaluation], after: dict[str, Evaluation], bits: dict) -> None:
    """The table before and after, and what deferral saved."""
    say(f"{'held-out accuracy':<16} {'before':>7} {'after':>7} {'change':>7}   95 % interval after")
    for name in before:
        old, new = before[name].summary, after[name].summary
        say(f"{name:<16} {old['accuracy']:>7.3f} {new['accuracy']:>7.3f} "
            f"{new['accuracy'] - old['accuracy']:>+7.3f}   "
            f"[{new['accuracy_low']:.3f}, {new['accuracy_high']:.3f}]")
    gate, dense = after["gate sampled"].summary, after["dense sampled"].summary
    say(f"passes per token: {gate['passes_per_token']:.2f} (dense {dense['passes_per_token']:.2f}); "
        f"tokens/s: {gate['tokens_per_second']:.0f} (dense {dense['tokens_per_second']:.0f}); "
        f"mean exit depth {gate['mean_depth']:.2f}")
    say(f"replay: {bits['replayed_tokens']} tokens, {bits['mismatched']} with different bits")


if __name__ == "__main__":
    run_cli(main)
