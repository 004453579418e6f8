"""The verify command: which model a log gets, what is reported, and the exit status."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from schedule_logs import SCHEDULES, forge, rollout_log
from tiny_models import keep_rule, tiny_model

from models import invariance
from models.checkpoint import load_model, save_model
from rollout.log import encode, read_log, write_log
from train import dense, verify
from train.dense import dense_values
from train.verify import find_logs, find_models, main, verify_logs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder: two checkpoints, and logs of both in float32 and bfloat16."""
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        place = folder / "checkpoints" / f"step-{step}" / "model"
        save_model(tiny_model(seed=step, dtype=torch.float32), place)
        for dtype in ("float32", "bfloat16"):
            logs = folder / "logs" / f"step-{step}" / dtype
            logs.mkdir(parents=True)
            write_log(rollout_log(SCHEDULES[2], model=load_model(place, dtype=dtype))[1], logs / "schedule.log")
    return folder


@pytest.fixture
def one(run, tmp_path):
    """A log of step 1 to alter, and its model's folder."""
    path = tmp_path / "schedule.log"
    path.write_bytes((run / "logs" / "step-1" / "float32" / "schedule.log").read_bytes())
    return path, run / "checkpoints" / "step-1" / "model"


def call(capsys, *arguments):
    """Exit status, lines before the last, and the object of the last line."""
    status = main(["replay", *map(str, arguments)])
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


def test_a_run_is_verified_with_its_own_checkpoints(run, capsys):
    status, lines, found = call(capsys, run, "--model", run)
    assert status == 0 and len(lines) == 4 and all("bit-equal" in line for line in lines)
    assert lines == sorted(lines)
    assert 0 < found.pop("dense_max_abs_diff") < 0.5 and found.pop("tokens") > 80
    assert found == {"mismatched": 0, "max_abs_diff": 0.0, "bit_equal": True, "redrawn_differ": 0, "logs": 4,
                     "refused": 0, "packed_tokens": 0}


def test_a_fresh_process_finds_the_same_bits(run):
    """Float32 and bfloat16: nothing of the process that sampled is needed."""
    command = [sys.executable, "-m", "train.verify", "replay", "logs", "--model", "checkpoints"]
    done = subprocess.run(command, cwd=run, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bit_equal"] and found["logs"] == 4


def test_dense_differs_by_rounding_only(run):
    """In float32 by a few roundings, in float64 by none that a float32 shows in the third digit."""
    report = verify_logs([run / "logs/step-1/float32"], [run / "checkpoints/step-1/model"], say=lambda line: None)
    assert 0 < report.verdicts[0].dense_max_abs_diff < 1e-4
    model, log = rollout_log("exit:2", dtype=torch.float64)
    wanted = torch.tensor([p for c in log.completions for p in c.logprobs], dtype=torch.float32)
    assert torch.allclose(dense_values(model, log.completions, 0.8), wanted, rtol=0, atol=1e-6)


def test_dense_values_do_not_depend_on_the_batches(monkeypatch):
    model, log = rollout_log("exit:2", dtype=torch.float64)
    whole = dense_values(model, log.completions, 0.8)
    monkeypatch.setattr(dense, "DENSE_ROWS", 20)
    assert len(list(dense._batches(log.completions))) > 2
    assert torch.allclose(dense_values(model, log.completions, 0.8), whole, rtol=0, atol=1e-7)


def test_the_first_token_that_differs_is_named(one, capsys):
    path, model = one
    log = read_log(path)
    second = log.completions[1]
    values = list(second.logprobs)
    values[2] -= 0.25
    values[3] -= 0.125
    write_log(replace(log, completions=(log.completions[0], replace(second, logprobs=tuple(values)),
                                        *log.completions[2:])), path)
    status, [line], found = call(capsys, path, "--model", model)
    assert status == 1 and not found["bit_equal"] and found["mismatched"] == 2
    assert abs(found["max_abs_diff"] - 0.25) < 1e-6
    assert f"2 differ, first at sequence 1, position {len(second.request.prompt) + 2}" in line


def test_a_value_that_is_not_finite_leaves_json_valid(one, capsys):
    path, model = one
    log = read_log(path)
    first = log.completions[0]
    values = (float("nan"), -float("inf"), *first.logprobs[2:])
    write_log(replace(log, completions=(replace(first, logprobs=values), *log.completions[1:])), path)
    status, _, found = call(capsys, path, "--model", model)
    assert status == 1 and found["mismatched"] == 2 and found["max_abs_diff"] is None


def test_tokens_of_another_seed_fail_although_the_bits_are_equal(one, capsys):
    path, model = one
    path.write_bytes(forge(path.read_bytes(), lambda described, arrays: described["header"].update(seed=4)))
    status, [line], found = call(capsys, path, "--model", model)
    assert status == 1 and found["bit_equal"] and found["redrawn_differ"] > 10
    assert "are not what the logged seed, uids and gate give" in line


def test_a_damaged_log_is_refused_by_name_and_the_others_are_replayed(run, one, capsys):
    path, model = one
    path.write_bytes(path.read_bytes()[:-1])
    status, lines, found = call(capsys, path, run / "logs/step-1/float32", "--model", model)
    assert status == 1 and found["refused"] == 1 and not found["bit_equal"] and found["tokens"] > 20
    assert lines[0] == f"{path}: refused: altered or cut short: the digest does not match the contents"


def test_a_log_of_no_checkpoint_is_refused(run, tmp_path, capsys):
    write_log(rollout_log(model=tiny_model(seed=9, dtype=torch.float32))[1], tmp_path / "schedule.log")
    status, [line], found = call(capsys, tmp_path, "--model", run / "checkpoints")
    assert status == 2 and found["tokens"] == 0 and found["refused"] == 1 and not found["bit_equal"]
    assert "refused: none of 2 models has the weights of the log" in line
    status, _, found = call(capsys, tmp_path, run / "logs", "--model", run / "checkpoints")
    assert status == 1 and found["refused"] == 1 and found["logs"] == 5


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab": 31, "weights": "0" * 64}, "made with vocab = 31, the model has 29"),
    ({"family": "llama", "weights": "0" * 64}, "made with family = 'llama', the model has 'ouro'"),
    ({"weights": "0" * 64}, "made by another model: its weights have digest 0000000000000000..."),
    ({"attention": "eager"}, "made with attention = 'eager', the model has 'sdpa'")])
def test_with_one_model_the_field_that_differs_is_named(one, capsys, changes, message):
    path, model = one
    path.write_bytes(forge(path.read_bytes(), lambda described, arrays: described["header"].update(changes)))
    status, [line], _ = call(capsys, path, "--model", model)
    assert status == 2 and f"refused: the log was {message}" in line


def test_dtype_and_profile_follow_the_log(tmp_path, capsys):
    save_model(tiny_model(dtype=torch.float32), tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="bfloat16", profile="fused")
    write_log(rollout_log(model=model)[1], tmp_path / "schedule.log")
    assert call(capsys, tmp_path, "--model", tmp_path / "model")[0] == 0


def test_other_thread_counts_are_refused_naming_both_before_weights_are_read(one, capsys, monkeypatch):
    path, model = one

    def never(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(verify, "load_model", never)
    try:
        status, [line], _ = call(capsys, path, "--model", model, "--threads", 2)
    finally:
        torch.set_num_threads(1)
    assert status == 2 and "made with threads = 1, this process has 2" in line


def test_events_that_make_no_sense_are_not_executed(one, capsys):
    path, model = one
    path.write_bytes(forge(path.read_bytes(), lambda described, arrays: described.update(peak_catch_up=99)))
    status, [line], _ = call(capsys, path, "--model", model)
    assert status == 2 and "refused: peak_catch_up = 99" in line


def test_a_broken_checkpoint_beside_the_right_one_is_passed_over(run, one, tmp_path, capsys):
    path, model = one
    broken = tmp_path / "a-broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert call(capsys, path, "--model", broken, model)[0] == 0
    status, [line], _ = call(capsys, path, "--model", broken, run / "checkpoints/step-2/model")
    assert status == 2 and "none of 2 models" in line and "a-broken/config.json is not valid JSON" in line


def test_a_checkpoint_is_not_loaded_to_learn_its_digest_again(tmp_path, monkeypatch):
    """Logs of models 1, 3 and 2: what was learnt of 1 and 2 on the way to 3 is kept."""
    loaded = []

    def counting(folder, **options):
        loaded.append(folder.name)
        return load_model(folder, **options)

    monkeypatch.setattr(verify, "load_model", counting)
    for number in (1, 3, 2):
        model = tiny_model(seed=number, dtype=torch.float32)
        save_model(model, tmp_path / f"model-{number}")
        write_log(rollout_log(model=model, count=1, new=2)[1], tmp_path / f"{number}.log")
    report = verify_logs([tmp_path / f"{n}.log" for n in (1, 3, 2)], [tmp_path], say=lambda line: None)
    assert report.status == 0 and loaded == ["model-1", "model-2", "model-3", "model-2"]


def test_paths_that_name_nothing_are_the_callers_mistake(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for logs, models, message in (([tmp_path / "no.log"], [run], "no.log does not exist"),
                                  ([tmp_path / "empty"], [run], "holds no schedule.log"),
                                  ([run], [tmp_path / "none"], "is not a folder"),
                                  ([run], [tmp_path / "empty"], "holds no config.json")):
        with pytest.raises(ValueError, match=message):
            verify_logs(logs, models)


def test_a_file_named_twice_counts_once(run):
    file = run / "logs/step-1/float32/schedule.log"
    assert find_logs([file, run / "logs/step-1", file]) == [file, run / "logs/step-1/bfloat16/schedule.log"]
    assert find_models([run, run / "checkpoints/step-1/model"]) == [
        run / f"checkpoints/step-{step}/model" for step in (1, 2)]


def test_a_log_without_sequences_is_refused(one, capsys):
    path, model = one
    log = read_log(path)
    path.write_bytes(encode(replace(log, completions=(), trained=(), events=(), peak_catch_up=0)))
    status, [line], _ = call(capsys, path, "--model", model)
    assert status == 2 and "it holds no sequences" in line


# ---- numerics invariant ----


@pytest.fixture
def exact(tmp_path):
    """A log of numerics `invariant`, and its model's folder."""
    save_model(tiny_model(dtype=torch.float32), tmp_path / "model")
    model = keep_rule(load_model(tmp_path / "model"), 40)
    write_log(rollout_log(SCHEDULES[2], model=model)[1], tmp_path / "schedule.log")
    return tmp_path / "schedule.log", tmp_path / "model"


@pytest.mark.parametrize("how, packed", [("passes", False), ("packed", True), ("both", True)])
def test_a_log_under_a_rule_is_compared_both_ways(exact, capsys, how, packed):
    path, model = exact
    status, [line], found = call(capsys, path, "--model", model, "--as", how)
    assert status == 0 and found["bit_equal"] and ("packed too" in line) == packed
    assert found["packed_tokens"] == (found["tokens"] if packed else 0) and found["dense_max_abs_diff"] == 0


@pytest.mark.parametrize("how", ["passes", "packed", "both"])
def test_one_changed_bit_is_found_either_way(exact, capsys, how):
    path, model = exact
    log = read_log(path)
    done = log.completions[1]
    values = torch.tensor(done.logprobs)
    values.view(torch.int32)[2] ^= 1
    log = replace(log, completions=(log.completions[0], replace(done, logprobs=tuple(values.tolist())),
                                    *log.completions[2:]))
    write_log(log, path)
    status, [line], found = call(capsys, path, "--model", model, "--as", how)
    assert status == 1 and found["mismatched"] == 1
    assert f"first at sequence 1, position {len(done.request.prompt) + 2}" in line


def test_a_log_of_shapes_is_refused_as_packed(one, capsys):
    path, model = one
    status, [line], found = call(capsys, path, "--model", model, "--as", "packed")
    assert status == 2 and found["refused"] == 1 and "numerics are shapes" in line


def test_a_rule_that_does_not_hold_here_is_named(exact, capsys, monkeypatch):
    path, model = exact
    monkeypatch.setattr(invariance, "_remembered", lambda *args: "linear q [8, 8]: rows differ")
    status, [line], found = call(capsys, path, "--model", model)
    assert status == 2 and "does not hold on this machine under the rule of the log: linear q" in line
