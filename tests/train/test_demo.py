"""The demo from end to end, shortened: two steps, few problems, everything it leaves behind."""

import json
import os
import signal

import pytest

from train import demo


def test_two_steps_on_a_few_problems_leave_everything(tmp_path, capsys):
    folder = tmp_path / "demo"
    status = demo.main(["--dir", str(folder), "--problems", "12", "run.steps=2", "rollout.prompts_per_step=8"])
    output = capsys.readouterr().out
    assert status == 0
    for name in ("curves.png", "schedule.png", "samples.jsonl", "metrics.jsonl", "config.toml", "tensorboard",
                 "checkpoints/step-000002/model/model.safetensors", "logs/step-000002/cohort-000/schedule.log",
                 "eval/after-gate-sampled.jsonl", "eval/after-dense-greedy.log"):
        assert (folder / name).exists(), name
    report = json.loads((folder / "demo.json").read_text())
    assert report["bits"]["mismatched"] == 0 and report["bits"]["replayed_tokens"] > 12 * 4
    assert set(report["before"]) == {"gate sampled", "gate greedy", "dense sampled", "dense greedy"}
    for name, summary in report["before"].items():
        assert summary["problems"] == 12 and summary["samples"] == (4 if "sampled" in name else 1)
    assert report["after"]["dense sampled"]["mean_depth"] == 4.0
    assert report["after"]["gate sampled"]["passes_per_token"] < report["after"]["dense sampled"]["passes_per_token"]
    assert "passes per token" in output and "0 with different bits" in output


def test_a_second_demo_takes_the_next_free_folder(tmp_path):
    assert demo.next_free(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert demo.next_free(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo/file").touch()
    assert demo.next_free(tmp_path / "demo") == tmp_path / "demo-2"


def test_a_signal_ends_the_demo_after_the_step(tmp_path, monkeypatch):
    """It saved and stopped training, and then evaluated for another minute."""
    asked = []

    def evaluations(*arguments):
        asked.append(arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(demo, "evaluations", evaluations)
    assert demo.main(["--dir", str(tmp_path / "demo"), "rollout.prompts_per_step=2"]) == 0
    assert len(asked) == 1
    assert (tmp_path / "demo/checkpoints/step-000001").is_dir()


@pytest.mark.thorough
def test_the_whole_demo_gains_what_the_readme_says(tmp_path):
    """Sampled accuracy rises by at least 25 points and greedy accuracy is not worse."""
    folder = tmp_path / "demo"
    assert demo.main(["--dir", str(folder)]) == 0
    report = json.loads((folder / "demo.json").read_text())
    for schedule in ("gate", "dense"):
        for kind, least in (("sampled", 0.25), ("greedy", -0.02)):
            before, after = (report[when][f"{schedule} {kind}"]["accuracy"] for when in ("before", "after"))
            assert after - before >= least, (schedule, kind, before, after)
