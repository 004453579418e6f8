"""The benchmark command: what it prints, what it refuses, and several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from engine import Engine, Request, Sampling
from models.checkpoint import save_model
from models.linear import packed_unavailable
from rollout import bench
from rollout.bench_model import agreement

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = ("--model", "synthetic:64x1x32", "--turns", "1", "--numerics", "shapes", "--prompt-tokens", "3")

both_operators = pytest.mark.skipif(packed_unavailable(torch.float32, "cpu") is not None,
                                    reason=f"no packed products: {packed_unavailable(torch.float32, 'cpu')}")


def report(capsys, *arguments):
    """(lines before the last one, the JSON of the last one) of a run."""
    assert bench.main([*SMALL, *arguments]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def torchrun(*arguments, processes=2):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(processes), *arguments], cwd=CHECKOUT, text=True, capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"})


def test_counts_of_a_run_by_hand(capsys, tmp_path):
    """4 loops, prompt of 3, 4 new tokens, so positions 0..5 are inputs.

    dense: 4 passes a token; 6 x 4 rows in 16 passes for a sequence. exit:2: half of both.
    periodic=2,4: tokens 1-3 take 2 passes each, then token 4 takes loops 1, 2, and 6 cells of loop 3,
    6 of loop 4: 10 passes, of whose 24 rows 5 + 5 were put off.
    """
    picture = tmp_path / "bench.png"
    lines, found = report(capsys, "--new-tokens", "4", "--batch", "1", "2", "--png", str(picture),
                          "--schedules", "dense", "exit:2", "exit:periodic=2,4")
    named = [(row["schedule"], row["batch"]) for row in found["results"]]
    assert named == [(s, b) for b in (1, 2) for s in ("dense", "exit:2", "exit:periodic=2,4")]
    for row in found["results"]:
        batch = row["batch"]
        passes, rows, older, peak = {"dense": (16, 24, 0, 0), "exit:2": (8, 12, 0, 0)}.get(row["schedule"],
                                                                                         (10, 24, 10, 5))
        assert row["passes_per_token"] == passes / 4
        assert row["rows_per_pass"] == batch * rows / passes
        assert (row["catch_up_rows"], row["peak_catch_up"]) == (batch * older, peak)
        assert row["catch_up_share"] == older / rows
        assert 0 <= row["gathered_share"] <= 1
        assert 0 < row["tokens_per_s_least"] <= row["tokens_per_s"] <= row["tokens_per_s_most"]
        assert row["decode_tokens_per_s"] > 0 and row["fastest"] and row["numerics"] == "shapes"
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["outside_share"] == pytest.approx(1 - row["shares"]["passes"])
        if row["schedule"] == "dense":
            assert row["ratio_to_dense"] == 1
    assert found["model"] == "synthetic:64x1x32" and found["command"].startswith("python -m rollout.bench --model")
    assert found["machine"]["threads"] == 1 and found["ranks"] == 1
    assert len(found["agreement"]) == 3 and found["agreement_tokens"] == 8
    assert len(lines) == 1 + 1 + 6 + 1 and lines[0].startswith("numerics shapes")
    assert picture.read_bytes().startswith(b"\x89PNG") and [f.name for f in tmp_path.iterdir()] == ["bench.png"]


def test_identical_arms_are_both_there(capsys):
    _, found = report(capsys, "--new-tokens", "2", "--batch", "2", "--schedules", "exit:1", "exit:1")
    assert [(row["arm"], row["schedule"]) for row in found["results"]] == [(0, "dense"), (1, "exit:1"), (2, "exit:1")]
    assert all(row["passes_per_token"] == 1 and row["ratio_to_dense"] > 0 for row in found["results"][1:])


@both_operators
def test_each_linear_operator_is_an_arm_of_its_own(capsys):
    lines, found = report(capsys, "--new-tokens", "2", "--batch", "2", "--schedules", "exit:1", "--linear", "each")
    rows = found["results"]
    assert [(row["schedule"], row["linear"]) for row in rows] == [
        ("dense", "native"), ("dense", "packed"), ("exit:1", "native"), ("exit:1", "packed")]
    base = next(row for row in rows if row["schedule"] == "dense" and row["fastest"])
    for row in rows:
        assert row["dense_linear"] == base["linear"]
        # One turn, so the ratio is that of the rates.
        assert row["ratio_to_dense"] == pytest.approx(row["tokens_per_s"] / base["tokens_per_s"])
    for schedule in ("dense", "exit:1"):
        fast, slow = sorted((row for row in rows if row["schedule"] == schedule), key=lambda row: not row["fastest"])
        assert fast["fastest"] and not slow["fastest"] and fast["tokens_per_s"] >= slow["tokens_per_s"]
    assert sum("packed*" in line or "native*" in line for line in lines) == 2


def test_one_new_token_leaves_nothing_to_decode(capsys):
    _, found = report(capsys, "--new-tokens", "1", "--batch", "1", "--schedules", "dense")
    assert found["results"][0]["decode_tokens_per_s"] is None and found["results"][0]["tokens_per_s"] > 0


def test_a_model_folder_and_greedy_tokens(capsys, tmp_path):
    save_model(tiny_model(dtype=torch.float32), tmp_path / "model")
    _, found = report(capsys, "--model", str(tmp_path / "model"), "--new-tokens", "3", "--batch", "1", "--temperature",
                      "0", "--schedules", "dense", "--dtype", "bfloat16", "--profile", "fused")
    assert found["results"][0]["passes_per_token"] == 3 and found["dtype"] == "bfloat16"


@both_operators
def test_parts(capsys):
    _, found = report(capsys, "--parts", "--new-tokens", "3", "--batch", "2", "--linear", "each")
    assert "results" not in found
    for part, kind in zip(found["parts"], ("native", "packed"), strict=True):
        assert (part["linear"], part["batch"], part["rows"], part["passes"], part["keys"]) == (kind, 2, 2, 8, [4, 5])
        assert part["dense_ms"] > part["pass_ms"] > 0
        # One turn, so ratios are those of the times.
        alone = part["linear_ms"] + part["attention_ms"]
        assert part["pass_to_parts"] == pytest.approx(part["pass_ms"] / alone)
        assert part["dense_to_parts"] == pytest.approx(part["dense_ms"] / (alone + part["head_ms"]))


@pytest.mark.parametrize("arguments, said", [
    (("--schedules", "dense", "exit:5"), "exit:5.*loop from 1 to 4"),
    (("--model", "synthetic:96x1x32"), "HIDDEN = 96 must be a multiple of 64.*use 128"),
    (("--model", "absent"), "'absent' is not a folder"),
    (("--batch", "2", "0"), "--batch 0 must be at least 1"),
    (("--new-tokens", "0"), "--new-tokens 0 must be at least 1"),
    (("--turns", "0"), "--turns 0 must be at least 1"),
    (("--prompt-tokens", "65536"), "65536 .*--new-tokens 32 exceed the model's 65536 positions; lower"),
    (("--temperature", "-1"), "temperature = -1"),
    (("--seed", str(2**64 - 1), "--turns", "2"), "seed = 18446744073709551616"),
    (("--device", "tpu"), "device = 'tpu'"),
    (("--synchronise",), "--synchronise: there is nothing to wait for on cpu"),
    (("--png", "absent/bench.png"), "--png 'absent/bench.png': must name a file in a folder that exists"),
    (("--png", "bench.svg"), r"end in \.png"),
    (("--parts", "--new-tokens", "1"), "--new-tokens 1 must be at least 2"),
    (("--parts", "--schedules", "dense"), "leave --schedules out"),
    (("--parts", "--png", "bench.png"), "leave --png out"),
])
def test_what_cannot_be_measured_is_refused_before_weights_are_made(monkeypatch, arguments, said):
    monkeypatch.setattr(bench, "make_models", None)
    with pytest.raises(ValueError, match=said):
        bench.main([*SMALL, *arguments])


def test_a_mistake_is_one_line_and_status_2():
    done = subprocess.run([sys.executable, "-m", "rollout.bench", *SMALL, "--batch", "0"], cwd=CHECKOUT, text=True,
                          capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert (done.returncode, done.stderr, done.stdout) == (2, "error: --batch 0 must be at least 1\n", "")


def test_two_ranks_run_the_same_arms_and_only_the_first_reports():
    done = torchrun("-m", "rollout.bench", *SMALL, "--new-tokens", "4", "--batch", "2", "--schedules",
                    "exit:periodic=2,4")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["ranks"] == 2 and len(lines) == 1 + 1 + 2 + 1
    dense, periodic = found["results"]
    assert (dense["batch"], dense["passes_per_token"], dense["rows_per_pass"]) == (2, 4, 2 * 24 / 16)
    # Two sequences on each of two ranks.
    assert (periodic["passes_per_token"], periodic["catch_up_rows"], periodic["peak_catch_up"]) == (2.5, 4 * 10, 5)


def test_ranks_wait_for_each_other_and_one_that_fails_ends_the_job_with_its_cause(tmp_path):
    script, late = tmp_path / "job.py", tmp_path / "late"
    script.write_text("import time\n"
                      "from pathlib import Path\n"
                      "from models.cli import run_cli\n"
                      "from rollout.bench_ranks import ranks_of_job\n"
                      "def main():\n"
                      f"    late = Path({str(late)!r})\n"
                      "    with ranks_of_job() as ranks:\n"
                      "        if ranks.rank == 1:\n"
                      "            time.sleep(0.5)\n"
                      "            late.touch()\n"
                      "        ranks.barrier()\n"
                      "        print('waited' if late.exists() else 'went on', flush=True)\n"
                      "        if ranks.rank == 1:\n"
                      "            raise ValueError('no memory here')\n"
                      "        ranks.barrier()\n"
                      "run_cli(main)\n")
    done = torchrun(str(script))
    assert done.returncode != 0 and done.stdout.splitlines() == ["waited", "waited"]
    assert "error: rank 1 of 2: no memory here" in done.stderr.splitlines()


def test_agreement_by_the_engine_itself():
    """Loop e agrees where `exit:e` would have chosen the token that dense chose, on dense's text."""
    model = tiny_model(dtype=torch.float32)
    requests = [Request((1 + i, 2), 6, uid=i) for i in range(3)]
    texts = Engine(model).generate(requests, Sampling(seed=5)).completions
    asked = [Request((*t.request.prompt, *t.token_ids[:n]), 1, uid=10 * i + n)
             for i, t in enumerate(texts) for n in range(6)]
    best = [[c.token_ids for c in Engine(model, f"exit:{loop}").generate(asked, Sampling(greedy=True)).completions]
            for loop in (1, 2, 3)]
    found = agreement(model, texts)
    assert found.tokens == 18 and found.entropy > 0
    assert found.shares == pytest.approx([sum(a == b for a, b in zip(best[loop], best[2], strict=True)) / 18
                                          for loop in (0, 1)])
