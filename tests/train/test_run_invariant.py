"""A run under numerics `invariant`, from files to checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import keep_rule
from tiny_run import overrides, write_model

from models.checkpoint import load_model
from rollout.log import read_log
from train.run import main


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def test_a_resumed_run_equals_the_uninterrupted_one(monkeypatch, tmp_path, dtype):
    """The rule is that of the checkpoint, every trained token is compared, and no bit of weights or logs moves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "again")
    keep_rule(load_model(tmp_path / "again", dtype=dtype), 1000)
    settings = {"model.dtype": dtype, "model.numerics": "invariant", "run.steps": 2, "run.save_every": 1}
    assert main(overrides(tmp_path, **settings)) == 0
    other = settings | {"run.dir": tmp_path / "parts", "run.resume": "auto"}
    for steps in (1, 2):
        assert main(overrides(tmp_path, **other | {"run.steps": steps})) == 0
    runs = [tmp_path / name for name in ("run", "parts")]
    one, two = (load_file(run / "checkpoints/step-000002/tensors.safetensors") for run in runs)
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    logs = [run / "logs/step-000002/cohort-001/schedule.log" for run in runs]
    assert logs[0].read_bytes() == logs[1].read_bytes() and read_log(logs[0]).header["numerics"] == "invariant"
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    assert all(row["replay/audited_tokens"] == row["update/trained_tokens"] > 0 for row in rows)
    assert all(row["policy/dense_minus_replay_max"] == 0 and row["ratio/not_one"] == 0 for row in rows)


def test_a_rule_that_is_not_the_checkpoints_is_refused_at_resume(monkeypatch, tmp_path):
    """Also the absence of one: bits of later steps would be those of another kernel or shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "again")
    keep_rule(load_model(tmp_path / "again"), 1000)
    settings = {"model.numerics": "auto", "run.steps": 1, "run.save_every": 1}
    assert main(overrides(tmp_path, **settings)) == 0
    monkeypatch.setattr("models.invariance.find_rule", lambda model, length: "nothing holds")
    monkeypatch.setattr("models.invariance.VERSION", "test")
    with pytest.raises(RuntimeError, match=r"the run was made with .*'invariant'.*to .*'shapes'"):
        main(overrides(tmp_path, **settings | {"run.steps": 2, "run.resume": "auto"}))
