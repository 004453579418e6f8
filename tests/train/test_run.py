"""A run from file to checkpoint: reruns, resumes, signals, logs without sampling, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import overrides

from models.checkpoint import load_model
from rollout.data import load_data
from train import checkpoint
from train.run import main

CHECKOUT = Path(__file__).resolve().parents[2]
CLOCK = ("seconds/", "rollout/tokens_per_second", "eval/tokens_per_second")


def rows(run: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(CLOCK)}
            for line in lines]


def state_bits(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "tensors.safetensors")


def assert_same_bits(first: Path, second: Path, step: int):
    one, other = state_bits(first, step), state_bits(second, step)
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of 4 steps."""
    folder = tmp_path_factory.mktemp("straight")
    assert main(overrides(folder)) == 0
    return folder


def test_a_run_leaves_what_a_person_expects(straight):
    run = straight / "run"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    for row in rows(run):
        assert row["ratio/not_one"] == 0 and row["ratio/max"] == 1 and row["replay/mismatched_bits"] == 0
        assert row["update/trained_tokens"] > 0 and 0 <= row["reward/mean"] <= 1
    for name in ("config.toml", "metrics.jsonl", "samples.jsonl", "curves.png", "tensorboard",
                 "logs/step-000004/cohort-001/schedule.log", "logs/step-000004/cohort-001/samples.jsonl"):
        assert (run / name).exists(), name
    exported = load_model(run / "checkpoints/step-000004/model")
    assert exported.digest() != load_model(straight / "model").digest()
    assert (run / "checkpoints/step-000004/model/tokenizer.json").exists()


def test_the_same_run_again_has_the_same_bits(straight, tmp_path):
    shutil.copytree(straight / "model", tmp_path / "model")
    for name in ("data.jsonl", "rewards.py"):
        shutil.copy(straight / name, tmp_path / name)
    assert main(overrides(tmp_path)) == 0
    assert_same_bits(straight / "run", tmp_path / "run", 4)
    assert rows(straight / "run") == rows(tmp_path / "run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_the_uninterrupted_one(dtype, tmp_path):
    """Twice resumed, so that a cursor lost at the first resume shows at the second."""
    model = {"model.dtype": dtype, "run.save_every": 1}
    assert main(overrides(tmp_path, **model)) == 0
    other = {**model, "run.dir": tmp_path / "parts"}
    for steps in (1, 3, 4):
        assert main(overrides(tmp_path, **other, **{"run.steps": steps, "run.resume": "auto"})) == 0
    assert_same_bits(tmp_path / "run", tmp_path / "parts", 4)
    assert rows(tmp_path / "run") == rows(tmp_path / "parts")
    for step in range(1, 5):
        logs = [tmp_path / name / f"logs/step-{step:06d}/cohort-001/schedule.log" for name in ("run", "parts")]
        assert logs[0].read_bytes() == logs[1].read_bytes()


def test_resuming_from_an_older_checkpoint_sets_later_rows_aside(straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    before = rows(run)
    arguments = [a for a in overrides(straight) if not a.startswith("run.dir=")] + [f"run.dir={run}"]
    assert main([*arguments, f"run.resume={run / 'checkpoints/step-000002'}"]) == 0
    assert rows(run) == before
    aside = list(run.glob("metrics.after-step-2*.jsonl"))
    assert len(aside) == 1
    assert [json.loads(line)["step"] for line in aside[0].read_text().splitlines()] == [3, 4]


@pytest.mark.parametrize("change, named", [
    ({"learner.learning_rate": 0.02}, "learner.learning_rate"),
    ({"rollout.temperature": 0.9}, "rollout.temperature"),
    ({"rollout.capacity.max_span": 32}, "rollout.capacity.max_span"),
    ({"model.dtype": "bfloat16"}, "model.dtype"),
])
def test_a_changed_setting_is_refused_at_resume_by_name(straight, change, named):
    with pytest.raises(ValueError, match=named):
        main(overrides(straight, **change, **{"run.resume": "auto", "run.steps": 5}))


def test_a_used_folder_is_refused_without_resume(straight):
    with pytest.raises(ValueError, match="not empty.*run.resume=auto"):
        main(overrides(straight))


def test_resume_without_a_checkpoint_starts_with_a_notice(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert main(overrides(tmp_path, **{"run.resume": "auto", "run.steps": 1})) == 0
    assert "starting from the beginning" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_skipped_by_name(straight, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(straight / "run", run)
    with open(run / "checkpoints/step-000004/tensors.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    arguments = [a for a in overrides(straight) if not a.startswith("run.dir=")] + [f"run.dir={run}"]
    assert main([*arguments, "run.resume=auto"]) == 0
    assert "step-000004" in capsys.readouterr().out
    assert_same_bits(straight / "run", run, 4)


def test_rollouts_written_first_and_trained_on_later_give_the_same_weights(straight, tmp_path):
    """The first step's logs are on-policy: value and gradient must be those of the direct run."""
    base = [a for a in overrides(straight) if not a.startswith(("run.dir=", "run.steps="))]
    assert main([*base, f"run.dir={tmp_path / 'logs'}", "run.steps=1", "--rollout-only"]) == 0
    assert not torch.equal(state_bits(straight / "run", 4)["master"],
                           state_bits(tmp_path / "logs", 1)["master"])
    arguments = [*base, f"run.dir={tmp_path / 'train'}", "run.steps=1", "--from-logs",
                 str(tmp_path / "logs/logs")]
    assert main(arguments) == 0
    direct = [*base, f"run.dir={tmp_path / 'direct'}", "run.steps=1"]
    assert main(direct) == 0
    assert_same_bits(tmp_path / "train", tmp_path / "direct", 1)


def test_seeds_are_separate(straight, tmp_path):
    """run.seed changes the tokens and not the prompts; data.data_seed changes the prompts."""
    def prompts_and_tokens(name, **changes):
        main([a for a in overrides(straight, **changes) if not a.startswith(("run.dir=", "run.steps="))]
             + [f"run.dir={tmp_path / name}", "run.steps=1", "--rollout-only"])
        lines = [json.loads(line) for cohort in (0, 1) for line in
                 (tmp_path / name / f"logs/step-000001/cohort-{cohort:03d}/samples.jsonl").read_text().splitlines()]
        return [line["example"] for line in lines], [line["text"] for line in lines]

    prompts, texts = prompts_and_tokens("one")
    assert prompts_and_tokens("again") == (prompts, texts)
    other_prompts, other_texts = prompts_and_tokens("seed", **{"run.seed": 4})
    assert other_prompts == prompts and other_texts != texts
    assert prompts_and_tokens("data", **{"data.data_seed": 1})[0] != prompts


def test_evaluation_during_training(tmp_path):
    assert main(overrides(tmp_path, **{"run.steps": 2, "run.eval_every": 2, "run.eval_samples": 2,
                                       "data.eval_path": tmp_path / "data.jsonl"})) == 0
    assert ["eval/accuracy" in row for row in rows(tmp_path / "run")] == [True, False, True]
    for step in (0, 2):
        lines = (tmp_path / f"run/eval/step-{step:06d}.jsonl").read_text().splitlines()
        assert len(lines) == 10 * 2


def start(folder: Path, **changes) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "train.run", *overrides(folder, **changes)],
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_row(run: Path, process: subprocess.Popen, count: int = 1):
    file = run / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and len(file.read_text().splitlines()) >= count):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_after_the_current_step_and_exits_0(number, tmp_path):
    process = start(tmp_path, **{"run.steps": 100_000, "run.save_every": 0})
    wait_for_row(tmp_path / "run", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert signal.Signals(number).name in output
    found = checkpoint.latest(tmp_path / "run/checkpoints", warn=print)
    assert int(found.name.removeprefix("step-")) == len(rows(tmp_path / "run"))


def test_a_killed_run_loses_only_what_came_after_the_last_checkpoint(straight, tmp_path):
    for name in ("model", "data.jsonl", "rewards.py"):
        source = straight / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    process = start(tmp_path, **{"run.steps": 100_000, "run.save_every": 2})
    wait_for_row(tmp_path / "run", process, count=3)
    process.kill()
    process.communicate()
    saved = checkpoint.latest(tmp_path / "run/checkpoints", warn=print)
    step = int(saved.name.removeprefix("step-"))
    assert step >= 2
    assert main(overrides(tmp_path, **{"run.steps": step + 1, "run.resume": "auto"})) == 0
    assert main(overrides(tmp_path, **{"run.dir": tmp_path / "whole", "run.steps": step + 1})) == 0
    assert_same_bits(tmp_path / "run", tmp_path / "whole", step + 1)


def test_real_problems_from_file_to_checkpoint_with_a_plug_in_reward(tmp_path):
    """GSM8K problems and a random model: a reward with spread within groups moves the weights."""
    problems = CHECKOUT / "tests/data/gsm8k/train.jsonl"
    assert len(load_data(problems, prompt_field="question").examples) >= 24
    assert main(overrides(tmp_path, **{
        "data.path": problems, "data.prompt_field": "question", "data.max_prompt_tokens": 900,
        "data.reward": f"{tmp_path / 'rewards.py'}:vowels", "rollout.max_new_tokens": 24,
        "rollout.group_size": 8, "rollout.capacity.pages": 4000, "run.steps": 2})) == 0
    for row in rows(tmp_path / "run"):
        assert row["reward/zero_variance"] <= 0.5 and row["update/gradient_norm"] > 0
    found = load_model(tmp_path / "run/checkpoints/step-000002/model").digest()
    assert found != load_model(tmp_path / "model").digest()


@pytest.mark.parametrize("change, named", [
    ({"rollout.max_new_tokens": 1020}, "longest prompt.*rollout.max_new_tokens = 1020.*max_positions = 1024"),
    ({"rollout.capacity.pages": 2}, "need 3 pages .* the engine has 2"),
    ({"run.trackers": '["papyrus"]'}, "papyrus"),
])
def test_what_can_never_work_is_refused_before_anything_is_written(change, named, tmp_path):
    """A prompt too long for the capacity stopped the run at whatever step took it; and the files of a
    refused start made the mended one be refused as well, for its folder was not empty."""
    with pytest.raises(ValueError, match=named):
        main(overrides(tmp_path, **change))
    assert not (tmp_path / "run").exists()


def test_the_longest_prompt_counts_wherever_it_stands(tmp_path):
    settings = overrides(tmp_path, **{"run.steps": 1})
    with open(tmp_path / "data.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "s" * 500, "answer": ""}) + "\n")
    with pytest.raises(ValueError, match="example '10'.*500 prompt"):
        main([*settings, "rollout.capacity.pages=20"])


def test_the_exact_capacity_is_enough(tmp_path):
    """6 prompt bytes and 6 new tokens, of which the last is never run: one page at each of 3 loops."""
    assert main(overrides(tmp_path, **{"rollout.capacity.pages": 3, "run.steps": 1})) == 0


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    """Two runs mixed their rows in one metrics.jsonl and deleted each other's half-written checkpoints."""
    changes = {"run.steps": 100_000, "run.save_every": 0}
    process = start(tmp_path, **changes)
    wait_for_row(tmp_path / "run", process)
    before = sorted((tmp_path / "run").iterdir())
    try:
        with pytest.raises(ValueError, match="run.dir.*in use"):
            main(overrides(tmp_path, **changes, **{"run.resume": "auto"}))
        assert sorted((tmp_path / "run").iterdir()) == before
    finally:
        process.kill()
        process.communicate()
    assert main(overrides(tmp_path, **{"run.steps": 1, "run.resume": "auto"})) == 0


def test_a_run_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="run.dir = .*file' is not a folder"):
        main(overrides(tmp_path, **{"run.dir": tmp_path / "file"}))


def test_a_process_of_several_is_refused(tmp_path, monkeypatch):
    """Started by torchrun itself, each process trained the whole run in the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE = 2.*several processes is not supported yet"):
        main(overrides(tmp_path))
    assert not (tmp_path / "run").exists()


def test_settings_stand_on_both_sides_of_an_option(tmp_path):
    """What came after `--resume auto` was an unrecognized argument."""
    settings = overrides(tmp_path)
    with pytest.raises(ValueError, match=r"run\.dirr: did you mean run\.dir"):
        main([*settings, "--resume", "auto", "run.dirr=x"])
    assert main([*settings, "--resume", "auto", "run.steps=1"]) == 0
    assert len(rows(tmp_path / "run")) == 1
