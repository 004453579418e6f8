"""`python -m train.run`: build everything, then run the loop of `train/trainer.py`.

The one place where a run's parts are built; the demo and the evaluation command call it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from engine.engine import Engine, Request
from engine.sampler import Sampling
from models.checkpoint import load_model
from models.cli import run_cli
from models.invariance import adopt_rule, set_numerics
from models.looped import LoopedLM
from models.numerics import configure
from models.tokenizer import Tokenizer, load_tokenizer, stop_ids
from rollout.data import fit_prompts
from rollout.generate import generation_config, note_ignored
from rollout.tasks import Task, load_task
from train import checkpoint
from train.config import TrainConfig
from train.config_file import load, to_toml
from train.evaluation import Evaluation, evaluate
from train.learner import Learner
from train.masters import Masters
from train.metrics import RunMetrics, check_trackers
from train.prompts import PromptStream
from train.rollouts import LoggedRollouts, SampledRollouts
from train.run_state import RunState
from train.trainer import StopSignal, Trainer

LOCK = ".lock"  # in the run folder; empty, held while a run is going


def build(config: TrainConfig) -> Trainer:
    """Everything of one run, resumed where the configuration says so.

    Errors: ValueError naming the setting that is at fault, before anything is written.
    """
    folder = Path(config.run.dir)
    check_trackers(config)
    resumed = find_checkpoint(config)
    device = configure(threads=config.run.threads, device=config.model.device)
    masters = Masters(load_model(config.model.path, device=device).weights)
    logged = None
    if config.run.from_logs is not None:
        logged = LoggedRollouts(config.run.from_logs, config.run.steps, config.rollout.cohorts)
    model = load_policy(config, device, logged)
    learner = Learner(config, model, masters, load_reference(config, device, model))
    learner.publish()
    if config.run.from_logs is None:
        rollouts, stream, evaluator = build_rollouts(config, model)
        check_fit(rollouts, stream, config.rollout.max_new_tokens)
        note_ignored(generation_config(config.model.path), rollouts.sampling)
        digest, grading = stream.digest, rollouts.grading
    else:
        rollouts, evaluator, digest, grading = logged, None, logged.digest, ""
    state = RunState(config, digest, grading, model.digest())
    hold(folder, fresh=config.run.resume == "never")
    if resumed is not None:
        state.load(resumed, learner)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    metrics = RunMetrics(folder, config, resume_step=state.step)
    return Trainer(config, learner, rollouts, state, metrics, StopSignal(), evaluator)


def load_policy(config: TrainConfig, device, logged: LoggedRollouts | None = None) -> LoopedLM:
    """The compute copy, on the linear operator and under the numerics that the configuration names.

    logged: rollouts that are trained on; with numerics auto or invariant their rule is kept.
    """
    options = config.model
    model = load_model(options.path, dtype=options.dtype, device=device, profile=options.profile, linear=options.linear)
    length = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if logged is not None and options.numerics != "shapes":
        header = logged.cohort(1, 0).log.header
        adopt_rule(model, header["rule"])
        say(f"numerics {model.numerics}, linear {model.linear}, as in the logs")
    else:
        say(set_numerics(model, options.numerics, length=length))
    return model


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint to resume from. ValueError when the folder is in use and resume is never."""
    folder, resume = Path(config.run.dir), config.run.resume
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.dir = {str(folder)!r} is not a folder: name another")
    if resume not in ("auto", "never"):
        return Path(resume)
    if resume == "auto":
        found = checkpoint.latest(folder / "checkpoints", say)
        if found is None:
            say(f"no checkpoint in {folder / 'checkpoints'}: starting from the beginning")
        return found
    refuse_used(folder)
    return None


def refuse_used(folder: Path) -> None:
    """ValueError where a run folder holds anything but its lock."""
    if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
        raise ValueError(f"run.dir = {str(folder)!r} is not empty: name a new folder, or continue with "
                         "run.resume=auto")


def hold(folder: Path, *, fresh: bool) -> None:
    """Make the run folder and keep other processes out of it for as long as this one lives.

    Two runs in one folder would mix their metrics and delete each other's checkpoints. The lock is
    the process's and ends with it, however that ends. fresh: nothing may have been written since
    the folder was first looked at. Errors: ValueError where another process holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # left open: closing it would unlock
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(lock)
        raise ValueError(f"run.dir = {str(folder)!r} is in use by a run that is still going: wait for it, "
                         "or name another folder") from None
    except OSError as error:  # a file system without locks
        say(f"{folder} cannot be locked ({error.strerror}): start no second run in it")
    if fresh:
        refuse_used(folder)


def load_reference(config: TrainConfig, device, policy: LoopedLM) -> LoopedLM | None:
    """The frozen model of the KL penalty, in the policy's dtype and profile.

    ValueError naming what differs where it could not replay the policy's logs.
    """
    reference = config.learner.reference
    if reference == "none":
        return None
    path = config.model.path if reference == "initial" else reference
    found = load_model(path, dtype=config.model.dtype, device=device, profile=config.model.profile,
                       linear=policy.linear)
    for name in ("family", "loops", "vocab", "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim"):
        own, other = getattr(policy.config, name), getattr(found.config, name)
        if own != other:
            raise ValueError(f"learner.reference = {path!r}: its {name} = {other!r}, that of model.path is {own!r}; "
                             "a reference has the shape of the policy")
    found.rule = policy.rule  # found for these shapes and kernels, whatever the weights
    return found


def build_rollouts(config: TrainConfig, model: LoopedLM):
    """Sampled rollouts, their prompts, and the evaluation on held-out prompts (or None)."""
    options, data = config.rollout, config.data
    tokenizer = load_tokenizer(config.model.path)
    task = load_task(data)
    stream = prompt_stream(config, task, tokenizer, data.split)
    sampling = Sampling(seed=config.run.seed, temperature=options.temperature,
                        stop_ids=stop_ids(model.config.eos_ids, tokenizer),
                        stop_strings=tuple(dict.fromkeys((*task.stop_strings, *options.stop))))
    engine = Engine(model, options.schedule, options.capacity, decode=tokenizer.decode)
    rollouts = SampledRollouts(options, engine, stream, sampling, task.reward, tokenizer.decode)
    if not config.run.eval_every:
        return rollouts, stream, None
    held_out = prompt_stream(config, task, tokenizer, data.eval_split)
    check_fit(rollouts, held_out, options.max_new_tokens)

    def run_evaluation() -> Evaluation:
        return evaluate(engine, held_out, sampling, task.reward, tokenizer.decode,
                        max_new_tokens=options.max_new_tokens, samples=config.run.eval_samples,
                        limit=config.run.eval_limit)

    return rollouts, stream, run_evaluation


def check_fit(rollouts: SampledRollouts, stream: PromptStream, max_new_tokens: int) -> None:
    """ValueError when a prompt's samples could never fit the model or the engine, naming the longest.

    The engine would refuse it too, but only at the step that takes this prompt.
    """
    rollouts.engine.check((), rollouts.sampling)  # the stop ids, whatever the prompts
    example, ids = max(stream.prompts, key=lambda prompt: len(prompt[1]))
    try:
        rollouts.engine.check([Request(ids, max_new_tokens, uid=0)], rollouts.sampling)
    except ValueError as error:
        raise ValueError(f"{stream.name}: the longest prompt (example {example.id!r}) with "
                         f"rollout.max_new_tokens = {max_new_tokens}: {error}") from None


def say(text: str) -> None:
    """One line for the person at the console."""
    print(text, flush=True)


def prompt_stream(config: TrainConfig, task: Task, tokenizer: Tokenizer, split: str) -> PromptStream:
    """The prompts of a split as token ids; too long ones are refused or skipped as configured."""
    data = task.data(split)
    prompts, skipped = fit_prompts(data, lambda example: task.encode(tokenizer, example),
                                   config.data.max_prompt_tokens, config.data.long_prompts)
    if skipped:
        say(f"{data.name}: {skipped} prompts longer than {config.data.max_prompt_tokens} tokens skipped")
    fitting = tuple((example, tuple(ids)) for example, ids in prompts)
    return PromptStream(data.name, data.digest, fitting, config.data.data_seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as a TOML file and overrides say."""
    parser = argparse.ArgumentParser(prog="train", description="Train a looped model by GRPO.",
                                     epilog="train/config.py lists every setting with its default and meaning.")
    parser.add_argument("--config", help="TOML file; see recipes/ (default: settings from overrides)")
    parser.add_argument("--resume", help="auto, never or a checkpoint folder: sets run.resume")
    parser.add_argument("--from-logs", metavar="DIR", help="train from schedule logs, without sampling")
    parser.add_argument("--rollout-only", action="store_true", help="write logs, train nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)  # settings may stand on both sides of an option
    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        overrides.append(f"run.resume={arguments.resume}")
    if arguments.from_logs is not None:
        overrides.append(f"run.from_logs={arguments.from_logs}")
    if arguments.rollout_only:
        overrides.append("run.rollout_only=true")
    config = load(arguments.config, overrides)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ValueError(f"WORLD_SIZE = {processes}: training in several processes is not supported yet; start "
                         "one, without torchrun")
    build(config).run()
    return 0


if __name__ == "__main__":
    run_cli(main)
