"""The benchmark of the learner's step: what both modes run, the figures by hand, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import keep_rule, tiny_model

from engine import Capacity, Engine, Request, Sampling
from models import invariance
from models.checkpoint import save_model
from rollout.log import from_rollout
from rollout.statistics import Statistics
from train import bench, bench_turns
from train.bench_turns import PHASES, Turn, cost_of_rule, learn, replays, result
from train.learner import PHASES as LEARNER_PHASES
from train.learner import Learner

SMALL = ("--prompts", "2", "--group", "2", "--cohorts", "2", "--prompt-tokens", "3", "--new-tokens", "4",
         "--turns", "2")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model whose numerics can be invariant on this machine; the test is skipped where they cannot."""
    model = tiny_model(dtype=torch.float32)
    keep_rule(model, 7)
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def report(capsys, *arguments):
    """(lines before the last one, the JSON of the last one) of a run."""
    assert bench.main([*SMALL, *map(str, arguments)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_a_run_of_both_modes_by_hand(capsys, folder):
    """2 cohorts of 2 samples, prompts of 3, 4 new tokens each read out at loop 2: 2 passes a token, so 8 a
    cohort; positions 0..5 are inputs, so 6 x 2 rows a sample, 48 in 16 passes."""
    lines, found = report(capsys, "--model", folder, "--schedule", "exit:2")
    assert [row["numerics"] for row in found["results"]] == ["shapes", "invariant"] and found["refused"] is None
    for row in found["results"]:
        assert (row["sequences"], row["prompt_tokens"], row["tokens"]) == (4, 12, 16)
        assert (row["passes"], row["rows_per_pass"], row["mean_depth"]) == (16, 3, 2)
        assert [phase["phase"] for phase in row["phases"]] == list(PHASES)
        assert sum(phase["percent"] for phase in row["phases"]) == pytest.approx(100)
        for one in (*((phase, "s") for phase in row["phases"]), (row, "rollout_s"), (row, "ms_per_pass"),
                    (row, "alone_ms"), (row, "passes_to_rollout"), (row, "step_s")):
            values, name = one
            assert 0 <= values[f"{name}_least"] <= values[name] <= values[f"{name}_most"]
        assert row["rollout_s"] == row["phases"][0]["s"] and row["alone_ms"] < row["ms_per_pass"] < 1000 * row["step_s"]
    shapes, invariant = found["results"]
    assert shapes["padded_rows_per_pass"] == 3 and shapes["packed_to_rollout"] is None
    assert invariant["padded_rows_per_pass"] >= 3 and invariant["packed_to_rollout"] > 0
    assert set(found["rule"]) == {f"{name}{end}" for name in ("rollout", "pass", "alone")
                                  for end in ("", "_least", "_most")}
    # Both modes made the same number of passes, so a pass costs what the rollout costs.
    assert found["rule"]["pass"] == pytest.approx(found["rule"]["rollout"]) and found["rule"]["alone"] > 0
    assert found["command"].startswith("python -m train.bench --prompts 2") and found["machine"]["threads"] == 1
    # numerics of two models; heading and both; cost of the rule; heading, phases, whole
    assert len(lines) == 2 + 3 + 1 + 1 + len(PHASES) + 1
    assert lines[0].startswith("numerics invariant") and lines[1].startswith("numerics shapes")


def test_both_modes_run_what_they_claim_on_the_same_requests(monkeypatch, capsys, folder):
    """Rollouts, replays and steps in turns: every log and every learner has its mode's numerics."""
    sampled, replayed, learned = [], [], []
    generate, step = Engine.generate, Learner.step

    def spy_generate(self, requests, *rest):
        rollout = generate(self, requests, *rest)
        sampled.append((rollout.header["numerics"], tuple(requests)))
        return rollout

    def spy_step(self, batches, step_number):
        learned.append((self.model.numerics, self.exact, {b.log.header["numerics"] for b in batches}, step_number,
                        self.model.digest(), {a for b in batches for a in b.advantages}))
        return step(self, batches, step_number)

    monkeypatch.setattr(Engine, "generate", spy_generate)
    monkeypatch.setattr(Learner, "step", spy_step)
    for kind, run in list(bench_turns.REPLAYS.items()):
        monkeypatch.setitem(bench_turns.REPLAYS, kind, lambda model, log, kind=kind, run=run, **options: (
            replayed.append((kind, model.numerics, log.header["numerics"])), run(model, log, **options))[1])
    report(capsys, "--model", folder, "--group", "8")
    # 3 turns of 2 cohorts; the same requests by one mode and then the other, no uid twice.
    pairs = [sampled[at:at + 2] for at in range(0, len(sampled), 2)]
    assert len(pairs) == 6 and all({name for name, _ in pair} == {"shapes", "invariant"} for pair in pairs)
    assert all(first[1] == second[1] for first, second in pairs)
    assert len({request.uid for pair in pairs for request in pair[0][1]}) == 3 * 16
    assert {len({request.prompt for request in pair[0][1]}) for pair in pairs} == {1}
    assert {pair[0][0] for pair in pairs} == {"shapes", "invariant"}  # who begins changes
    assert all(model == log for _, model, log in replayed)
    assert [replayed.count((kind, mode, mode)) for kind, mode in (
        ("passes", "shapes"), ("passes", "invariant"), ("packed", "invariant"), ("packed", "shapes"))] == [6, 6, 6, 0]
    assert sorted(found[:4] for found in learned) == sorted(
        (mode, mode == "invariant", {mode}, step) for mode in ("shapes", "invariant") for step in (1, 2, 3))
    assert len({found[4] for found in learned}) == 1  # a learning rate of 0: all turns have the same weights
    assert all(found[5] == {1.0, -1.0} for found in learned)  # so every micro-batch has a backward


def test_without_a_rule_the_reason_is_said_and_shapes_measured_alone(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the false answer is remembered there
    monkeypatch.setattr(invariance, "find_rule", lambda model, length: "product q: rows differ here")
    lines, found = report(capsys, "--model", "synthetic:64x1x32", "--dtype", "bfloat16")
    assert [row["numerics"] for row in found["results"]] == ["shapes"] and found["rule"] is None
    assert "product q: rows differ here" in lines[0] and found["refused"] == lines[0]
    assert found["results"][0]["tokens"] == 16 and found["dtype"] == "bfloat16"
    assert not any("cost of the rule" in line for line in lines)


def counted(passes, tokens=10):
    return Statistics(sequences=2, prompt_tokens=6, tokens=tokens, passes=passes, spans=0, rows=60, padded_rows=80,
                      dense_cells=0, catch_up_rows=0, peak_catch_up=0, depths=(0, tokens))


def made(passes, rollout, alone, packed=None, **phases):
    replay = {"passes": rollout / 2} | ({} if packed is None else {"packed": packed})
    return Turn(counted(passes), rollout, alone, replay, dict.fromkeys(PHASES, 0.0) | {"rollout": rollout} | phases)


def test_figures_by_hand():
    shapes = [made(20, 2.0, 1.0, dense=6.0), made(10, 1.0, 0.5, dense=3.0), made(20, 4.0, 3.0, dense=4.0)]
    invariant = [made(10, 3.0, 2.0, packed=0.3), made(10, 1.0, 0.5, packed=0.2), made(40, 2.0, 1.5, packed=1.0)]
    wanted = {  # turns: 1.5, 1, 0.5; a pass 300 / 100, 1, 50 / 200 ms; itself 200 / 50, 1, 37.5 / 150 ms
        "rollout": 1.0, "rollout_least": 0.5, "rollout_most": 1.5, "pass": 1.0, "pass_least": 0.25, "pass_most": 3.0,
        "alone": 1.0, "alone_least": 0.25, "alone_most": 4.0}
    assert cost_of_rule(shapes, invariant) == {name: pytest.approx(value) for name, value in wanted.items()}
    model = tiny_model(dtype=torch.float32)
    found = result(model, shapes)
    assert (found["sequences"], found["prompt_tokens"], found["tokens"]) == (2, 6, 10)
    assert found["passes"] == pytest.approx(50 / 3)
    assert (found["rows_per_pass"], found["padded_rows_per_pass"]) == (180 / 50, 240 / 50)
    assert (found["rollout_s"], found["rollout_s_least"], found["rollout_s_most"]) == (2.0, 1.0, 4.0)
    assert (found["ms_per_pass"], found["alone_ms"]) == (100.0, 50.0)
    assert found["passes_to_rollout"] == 0.5 and found["packed_to_rollout"] is None
    assert found["step_s"] == 8.0  # of 8, 4 and 8
    assert {p["phase"]: p["percent"] for p in found["phases"] if p["percent"]} == {
        "rollout": pytest.approx(35), "dense": pytest.approx(65)}
    assert result(model, invariant)["packed_to_rollout"] == pytest.approx(0.2)  # of 0.1, 0.2 and 0.5


def tiny_log(model):
    requests = [Request((1 + i, 2), 3, uid=i) for i in range(2)]
    return from_rollout(Engine(model, "exit:2", Capacity(max_sequences=2)).generate(requests, Sampling()))


def test_what_a_step_spends_beside_its_phases_is_other(monkeypatch):
    class Scripted:
        def step(self, batches, step):
            assert [b.advantages for b in batches] == [(-1.0, 1.0)]  # by the last bit of the uids 0 and 1
            clock.append(clock[-1] + 100)
            return {f"seconds/{phase}": 3.0 for phase in LEARNER_PHASES}

    clock, log = [7.0], tiny_log(tiny_model(dtype=torch.float32))
    monkeypatch.setattr(bench_turns.time, "perf_counter", lambda: clock[-1])
    found = learn(Scripted(), [log], 1)
    assert found == dict.fromkeys(LEARNER_PHASES, 3.0) | {"other": 100.0 - 18.0}


def test_a_replay_of_other_bits_is_no_measurement():
    model = tiny_model(dtype=torch.float32)
    log = tiny_log(model)
    assert set(replays(model, log)) == {"passes"}
    first = replace(log.completions[0], logprobs=(-1.0, *log.completions[0].logprobs[1:]))
    with pytest.raises(RuntimeError, match=r"numerics shapes: replay \(passes\) differs from the rollout in 1 of 6"):
        replays(model, replace(log, completions=(first, log.completions[1])))


@pytest.mark.parametrize("arguments, said", [
    (("--schedule", "exit:5"), "exit:5.*loop from 1 to 4"),
    (("--model", "synthetic:96x1x32"), "HIDDEN = 96 must be a multiple of 64.*use 128"),
    (("--model", "absent"), "'absent' is not a folder"),
    (("--prompts", "0"), "--prompts 0 must be at least 1"),
    (("--prompts", "3"), "--prompts 3 must be a multiple of --cohorts 2"),
    (("--cohorts", "0"), "--cohorts 0 must be at least 1"),
    (("--group", "1"), "--group 1 must be at least 2"),
    (("--group", str(2**30)), "group_size.*at most 1,048,576"),
    (("--new-tokens", "0"), "--new-tokens 0 must be at least 1"),
    (("--turns", "0"), "--turns 0 must be at least 1"),
    (("--prompt-tokens", "65536"), "65536 .*exceed the model's 65536 positions; lower"),
    (("--seed", "-1"), "seed = -1"),
    (("--threads", "0"), "threads = 0"),
])
def test_what_cannot_be_measured_is_refused_before_weights_are_made(monkeypatch, arguments, said):
    monkeypatch.setattr(bench, "make_models", None)
    with pytest.raises(ValueError, match=said):
        bench.main(["--model", "synthetic:64x1x32", *SMALL, *arguments])
