"""The device check on a CPU: every part ok, a part that fails or hangs leaves the others' results."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from train import gpu_check


def test_every_part_is_ok_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "SECONDS", dict.fromkeys(gpu_check.PARTS, 300))
    assert gpu_check.main(["--out", str(tmp_path), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(found) == ["environment", "replay", "invariant", "training", "bench"]
    assert found["environment"]["threads"] == 1
    cells = found["replay"]["cells"]
    assert len(cells) == 2 * 2 * len(gpu_check.SCHEDULES)
    assert all(cell["mismatched"] == 0 and cell["tokens"] > 0 for cell in cells)
    cells = found["invariant"]["cells"]
    assert len(cells) == 4 and all(cell["numerics"].startswith("numerics ") for cell in cells)
    assert all(cell.get("mismatched", 0) == 0 for cell in cells) and found["invariant"]["ok"]
    assert all(len(set(digests)) == 1 for digests in found["training"]["digests"].values())
    assert len(found["bench"]["results"]) == 2 * len(gpu_check.SCHEDULES)


def test_a_part_that_hangs_or_dies_leaves_the_others(tmp_path, monkeypatch):
    def run(command, timeout, **rest):
        part = command[-1]
        if part == "replay":
            raise subprocess.TimeoutExpired(command, timeout)
        if part == "training":
            return SimpleNamespace(returncode=-11, stdout="", stderr="")
        return SimpleNamespace(returncode=0, stdout='{"ok": true}\n', stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["replay"]["error"].startswith("no result within")
    assert found["training"]["error"] == "exit status -11"
    assert found["bench"]["ok"]


def test_a_mismatch_fails_the_check(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(gpu_check, "SCHEDULES", ("exit:2",))
    monkeypatch.setattr(gpu_check, "DTYPES", ("float32",))
    import train.replay

    original = train.replay.replay

    def wrong(model, log):
        found = original(model, log)
        found.values[0] = torch.nextafter(found.values[0], torch.tensor(0.0))
        return found

    monkeypatch.setattr(train.replay, "replay", wrong)
    found = gpu_check.replay_bits(torch.device("cpu"))
    assert not found["ok"] and found["cells"][0]["mismatched"] == 1


def test_only_the_packages_of_a_bare_machine_are_imported():
    """No datasets, jinja2, pyarrow or pandas on the way to any part."""
    code = ("import sys; import train.gpu_check, rollout.log, rollout.structure, train.replay, train.learner, "
            "train.masters, train.config; "
            "print(sorted({m.split('.')[0] for m in sys.modules} & {'datasets', 'jinja2', 'pyarrow', 'pandas', "
            "'transformers', 'matplotlib'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stderr)
    assert done.stdout.strip() == "[]"
