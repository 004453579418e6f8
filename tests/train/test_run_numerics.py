"""Runs under numerics `invariant` and on another linear operator: settings, resume, logs, reruns."""

import json
from pathlib import Path

import pytest
import torch
from tiny_run import overrides

from models import invariance
from models.checkpoint import load_model
from models.linear import packed_unavailable
from rollout.log import read_log
from train.config_file import load
from train.run import build


@pytest.fixture(autouse=True)
def holds(tmp_path):
    """Skipped with the probe's reason where no rule holds here."""
    overrides(tmp_path)
    model = load_model(tmp_path / "model")
    reason = invariance.set_numerics(model, "auto", length=64)
    if model.rule is None:
        pytest.skip(reason)


def run(folder, **changes):
    trainer = build(load(None, overrides(folder, **{"model.numerics": "invariant"} | changes)))
    trainer.run()
    return trainer.learner


def weights(folder, step=4):
    return load_model(folder / f"run/checkpoints/step-{step:06d}/model").digest()


def headers(folder):
    return [read_log(path).header for path in sorted(Path(folder, "run/logs").rglob("schedule.log"))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reruns_and_resumes_have_the_same_weights(tmp_path, dtype, capsys):
    run(tmp_path, **{"model.dtype": dtype})
    assert "numerics invariant, linear native (rows" in capsys.readouterr().out
    straight, rows = weights(tmp_path), headers(tmp_path)
    assert all(header["numerics"] == "invariant" and header["rule"] for header in rows)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["ratio/not_one"] == 0 and row["policy/dense_minus_replay_max"] == 0 for row in metrics)
    assert all(row["replay/audited_tokens"] == row["update/trained_tokens"] for row in metrics)
    (tmp_path / "run").rename(tmp_path / "first")
    run(tmp_path, **{"model.dtype": dtype, "run.steps": 2, "learner.schedule_steps": 4})
    run(tmp_path, **{"model.dtype": dtype, "run.resume": "auto", "learner.schedule_steps": 4})
    assert weights(tmp_path) == straight


def test_logs_are_trained_on_under_their_own_rule(tmp_path):
    """The configuration's lengths would ask for another rule; that of the logs is kept."""
    run(tmp_path)
    straight, rule = weights(tmp_path), headers(tmp_path)[0]["rule"]
    (tmp_path / "run").rename(tmp_path / "first")
    learner = run(tmp_path, **{"run.from_logs": tmp_path / "first/logs", "run.steps": 4,
                               "data.max_prompt_tokens": 900, "model.numerics": "auto"})
    assert vars(learner.model.rule) == rule
    assert weights(tmp_path) == straight


def test_a_resume_that_resolves_otherwise_is_refused(tmp_path, monkeypatch):
    run(tmp_path, **{"model.numerics": "auto", "run.steps": 2})
    monkeypatch.setattr(invariance, "_remembered", lambda *args: "linear q: rows differ")
    with pytest.raises(RuntimeError, match="the run was made with .*'invariant'.*resolves .*'shapes'"):
        build(load(None, overrides(tmp_path, **{"model.numerics": "auto", "run.resume": "auto"})))


def test_where_it_does_not_hold_it_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(invariance, "_remembered", lambda *args: "linear q: rows differ")
    with pytest.raises(ValueError, match="numerics = 'invariant' does not hold on this machine: linear q"):
        run(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_reference_keeps_the_rule_and_the_operator(tmp_path):
    linear = "native" if packed_unavailable(torch.float32, "cpu") else "packed"
    learner = run(tmp_path, **{"model.linear": linear, "learner.reference": "initial", "learner.kl_coefficient": 0.1,
                               "run.steps": 1})
    assert learner.reference.kernels == learner.model.kernels
    assert headers(tmp_path)[0]["linear"] == linear


def test_settings_of_the_model_folder_that_nobody_applies_are_named(tmp_path, capsys):
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"top_k": 50, "repetition_penalty": 1.05}))
    run(tmp_path, **{"run.steps": 1})
    assert "generation_config.json sets top_k = 50, repetition_penalty = 1.05" in capsys.readouterr().err
