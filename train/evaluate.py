"""`python -m train.evaluate`: accuracy of a model on a task under a schedule.

Prints one line a figure and, as its last line, one JSON object; `--out` writes one JSON object a
sample, `--log-dir` the schedule log, so that the evaluation can be replayed. What decides how
tokens are drawn is printed on stderr, with what generation_config.json sets and nobody applies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from engine.engine import Engine
from engine.sampler import Sampling
from models.cli import run_cli
from models.invariance import MODES
from models.numerics import configure
from rollout.collect import LOG_FILE
from rollout.generate import choose_capacity, generation_config, note_ignored
from rollout.log import write_log
from rollout.samples import check_outputs, write_rows
from train.config import MOST_SAMPLES
from train.config_file import load
from train.evaluation import evaluate, evaluation_requests
from train.run import build_rollouts, load_policy


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print."""
    arguments = parse(argv)
    check_outputs(arguments.out, arguments.log_dir)
    drawing = {"greedy": arguments.temperature == 0, "top_k": arguments.top_k, "top_p": arguments.top_p}
    Sampling(**drawing)  # refused before weights are read
    config = load(None, settings(arguments))
    device = configure(threads=config.run.threads, device=config.model.device)
    model = load_policy(config, device)
    rollouts, stream, _ = build_rollouts(config, model)
    requests = evaluation_requests(stream, arguments.max_new_tokens, arguments.samples, arguments.limit)
    capacity = choose_capacity(requests, rollouts.engine.schedule.max_depth,
                               {"max_sequences": min(arguments.batch, len(requests))})
    sampling = replace(rollouts.sampling, **drawing)
    print(f"sampling: {sampling.describe()}, at most {arguments.max_new_tokens} new tokens", file=sys.stderr)
    note_ignored(generation_config(arguments.model), sampling)
    engine = Engine(model, arguments.schedule, capacity, decode=rollouts.decode)
    with tqdm(total=len(requests), unit="sample", disable=None) as bar:
        result = evaluate(
            engine, stream, sampling, rollouts.reward, rollouts.decode,
            max_new_tokens=config.rollout.max_new_tokens, samples=arguments.samples, limit=arguments.limit,
            on_finish=lambda _: bar.update())
    if arguments.out:
        write_rows(result.rows, arguments.out)
    if arguments.log_dir:
        Path(arguments.log_dir).mkdir(parents=True, exist_ok=True)
        write_log(result.cohort.log, Path(arguments.log_dir) / LOG_FILE)
    for name, value in result.summary.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    print(json.dumps(result.summary))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--task", help="built-in task: gsm8k, calculator")
    parser.add_argument("--data", help="JSONL or parquet file, folder or hub name (with --reward or --task gsm8k)")
    parser.add_argument("--reward", help="path/file.py:function or package.module:function")
    parser.add_argument("--split", default="test", help="default test")
    parser.add_argument("--schedule", default="dense", help="default dense")
    parser.add_argument("--samples", type=int, default=1, help="samples k of each problem; default 1")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k most likely tokens; default 0: all")
    parser.add_argument("--top-p", type=float, default=1.0,
                        help="sample among the most likely tokens that reach p together; default 1: all")
    parser.add_argument("--limit", type=int, help="first problems only")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="default 1024")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--profile", default="hf", choices=("hf", "fused"))
    parser.add_argument("--numerics", default="shapes", choices=MODES, help="how bits repeat; default shapes")
    parser.add_argument("--linear", default="native", choices=("native", "packed", "auto"),
                        help="linear operator; default native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="sequences in the engine at once; default 64")
    parser.add_argument("--out", metavar="FILE.jsonl", help="one JSON object a sample")
    parser.add_argument("--log-dir", metavar="DIR", help="write the schedule log there")
    arguments = parser.parse_args(argv)
    for name in ("samples", "limit", "batch"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MOST_SAMPLES:
            parser.error(f"--{name} = {value} must be at least 1 and at most {MOST_SAMPLES:,}")
    if not 0 <= arguments.temperature < float("inf"):
        parser.error(f"--temperature = {arguments.temperature} must be a finite number of at least 0")
    return arguments


def settings(arguments: argparse.Namespace) -> list[str]:
    """The same as settings of a training run, so that one reading of them exists."""
    found = {
        "model.path": arguments.model, "model.dtype": arguments.dtype,
        "model.profile": arguments.profile, "model.numerics": arguments.numerics, "model.linear": arguments.linear,
        "model.device": arguments.device,
        "data.task": arguments.task, "data.path": arguments.data, "data.reward": arguments.reward,
        "data.split": arguments.split, "data.max_prompt_tokens": arguments.max_prompt_tokens,
        "rollout.schedule": arguments.schedule,
        "rollout.temperature": arguments.temperature or 1.0,
        "rollout.max_new_tokens": arguments.max_new_tokens, "run.seed": arguments.seed,
    }
    return [f"{name}={value}" for name, value in found.items() if value is not None]


if __name__ == "__main__":
    run_cli(main)
