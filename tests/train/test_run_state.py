"""Resuming: what decides bits and is no setting must not have changed either."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import overrides, write_model

from train import run_state
from train.run import main


def test_it_resumes_where_nothing_has_changed(tmp_path):
    """Guards the refusals below: the same two runs without a change between them."""
    assert main(overrides(tmp_path, **{"run.steps": 1})) == 0
    assert main(overrides(tmp_path, **{"run.steps": 2, "run.resume": "auto"})) == 0


@pytest.fixture
def resume(tmp_path):
    """A run of one step with a reference model beside it; calls back for a second step."""
    write_model(tmp_path / "reference")
    changes = {"learner.reference": tmp_path / "reference", "learner.kl_coefficient": 0.1}
    assert main(overrides(tmp_path, **changes, **{"run.steps": 1})) == 0
    return lambda: main(overrides(tmp_path, **changes, **{"run.steps": 2, "run.resume": "auto"}))


def test_other_prompts_are_refused(resume, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(file.read_text().replace("say 3", "cry 3"))
    with pytest.raises(RuntimeError, match="the prompts have changed"):
        resume()


def test_another_tokenizer_is_refused(resume, tmp_path):
    """The digest covered the texts alone: a tokenizer that gives other ids went unnoticed."""
    file = tmp_path / "model/tokenizer.json"
    whole = json.loads(file.read_text())
    vocab = whole["model"]["vocab"]
    vocab["s"], vocab["z"] = vocab["z"], vocab["s"]
    file.write_text(json.dumps(whole))
    with pytest.raises(RuntimeError, match="the prompts have changed"):
        resume()


@pytest.mark.parametrize("folder, named", [("model", "model folder's weights"), ("reference", "reference model's")])
def test_other_weights_are_refused(resume, tmp_path, folder, named):
    """Of the reference nothing was kept, so a penalty against other weights went on unnoticed."""
    file = tmp_path / folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.nextafter(weights["model.norm.weight"], torch.tensor(0.0))
    save_file(weights, file)
    with pytest.raises(RuntimeError, match=f"{named} .*have changed"):
        resume()


def test_another_reward_or_stop_id_is_refused(resume, tmp_path):
    """Both decide what later steps train on, and neither is a setting."""
    file = tmp_path / "rewards.py"
    before = file.read_text()
    file.write_text(before + "# edited\n")
    with pytest.raises(RuntimeError, match="reward's file or the stop ids have changed"):
        resume()
    file.write_text(before)
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 7}')
    with pytest.raises(RuntimeError, match="reward's file or the stop ids have changed"):
        resume()


def test_other_logs_are_refused(tmp_path):
    """Only the folder's name was compared, so edited rewards went unnoticed."""
    assert main([*overrides(tmp_path), "run.steps=2", f"run.dir={tmp_path / 'logs'}", "--rollout-only"]) == 0
    settings = [*overrides(tmp_path), f"run.from_logs={tmp_path / 'logs/logs'}", "run.resume=auto"]
    assert main([*settings, "run.steps=1"]) == 0
    file = tmp_path / "logs/logs/step-000002/cohort-000/samples.jsonl"
    file.write_text(file.read_text().replace('"reward": 1.0', '"reward": 0.5'))
    file.write_text(file.read_text().replace('"reward": 0.0', '"reward": 0.5'))
    with pytest.raises(RuntimeError, match="the logs have changed"):
        main([*settings, "run.steps=2"])


def test_another_library_version_is_refused(resume, monkeypatch):
    """A resume under another torch gave other bits than the uninterrupted run, without a word."""
    monkeypatch.setattr("train.replay.fingerprint", lambda device: run_state.fingerprint(device) | {"torch": "9.9"})
    with pytest.raises(RuntimeError, match=r"checkpoint .*step-000001 was made with torch = .*has '9.9'"):
        resume()
