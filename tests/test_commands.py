"""Commands as a person runs them: through launch.sh, from a folder of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import overrides

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture
def elsewhere(tmp_path):
    """A folder whose own packages have the names of this project's."""
    for name in ("train", "models", "engine", "rollout"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the caller\\'s own package')\n")
    overrides(tmp_path / "files")
    return tmp_path


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(CHECKOUT / "launch.sh"), *map(str, arguments)], cwd=folder, text=True,
                          capture_output=True, timeout=300,
                          env={**os.environ, "PYTHON": sys.executable, **environment})


def test_generate_runs_in_a_folder_with_packages_of_the_same_names(elsewhere):
    """The checkout's packages are imported whatever lies in the current directory."""
    done = launch(elsewhere, "generate", "--model", "files/model", "--prompt", "one", "two", "--schedule", "exit:2",
                  "--max-new-tokens", "5", "--log-dir", "log")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "two"]
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["exit_depths"]) == 5
        assert set(row["exit_depths"]) == {2} and row["finish_reason"] == "length"
    verified = launch(elsewhere, "verify", "replay", "log", "--model", "files/model")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout.splitlines()[-1])["bit_equal"]


def test_train_takes_a_reward_file_relative_to_the_caller(elsewhere):
    settings = [s for s in overrides(elsewhere / "files") if not s.startswith(("data.reward=", "run.dir="))]
    done = launch(elsewhere, "train", *settings, "data.reward=files/rewards.py:token_parity", "run.dir=my run",
                  "run.steps=1")
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "my run/checkpoints/step-000001/model/config.json").exists()


@pytest.mark.parametrize("arguments, message", [
    (("generate", "--model", "absent", "--prompt", "x", "--schedule", "dense", "--max-new-tokens", "1"), "absent"),
    (("train", "model.path=files/model", "learner.lora_rank=8"), "LoRA"),
    (("verify", "replay", "absent", "--model", "files/model"), "absent"),
    (("draw", "files/data.jsonl", "--out", "x.png"), "files/data.jsonl"),
    (("evaluate", "--model", "files/model", "--task", "absent"), "absent"),
])
def test_a_mistake_is_one_line_and_status_2(elsewhere, arguments, message):
    done = launch(elsewhere, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and message in done.stderr.splitlines()[-1]


def test_the_example_of_the_readme_runs_as_it_is_printed():
    section = (CHECKOUT / "README.md").read_text(encoding="utf-8").split("## In Python")[1].split("\n## ")[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONSAFEPATH": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 log-probs differ"
