"""Evaluation figures by hand: accuracy, intervals, pass@k; the command on the embedded task."""

import json

import pytest
from tiny_run import overrides

from rollout.structure import read_checked
from train.evaluate import main
from train.evaluation import score_summary


def test_pass_at_k_and_accuracy_by_hand():
    """Solved 2, 0 and 4 of 4: pass@1 = mean of 1/2, 0, 1; pass@2 = mean of 1 - C(2,2)/C(4,2), 0, 1."""
    found = score_summary([[1.0, 0.0, 1.0, 0.0], [0.0] * 4, [1.0] * 4])
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)


def test_interval_over_problems_by_hand():
    """Means 0.5, 0, 1: standard deviation 0.5, so 1.96 * 0.5 / sqrt(3) on both sides."""
    found = score_summary([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    half = 1.959963984540054 * 0.5 / 3**0.5
    assert found["accuracy_low"] == pytest.approx(0.5 - half)
    assert found["accuracy_high"] == pytest.approx(0.5 + half)


def test_right_or_wrong_problems_have_wilsons_interval():
    """8 of 10: 0.4902 to 0.9433, the textbook value of Wilson's interval."""
    found = score_summary([[1.0]] * 8 + [[0.0]] * 2)
    assert found["accuracy_low"] == pytest.approx(0.4902, abs=1e-4)
    assert found["accuracy_high"] == pytest.approx(0.9433, abs=1e-4)


def test_partial_rewards_are_not_solved():
    found = score_summary([[0.5, 0.5], [1.0, 0.5]])
    assert found["accuracy"] == pytest.approx(0.625)
    assert found["pass@2"] == pytest.approx(0.5)


def test_three_samples_report_pass_at_one_two_and_three():
    assert [name for name in score_summary([[1.0, 0.0, 0.0]]) if name.startswith("pass@")] == [
        "pass@1", "pass@2", "pass@3"]


def test_the_command_writes_samples_and_a_log(tmp_path, capsys):
    settings = dict(pair.split("=", 1) for pair in overrides(tmp_path))
    arguments = ["--model", settings["model.path"], "--data", settings["data.path"], "--split", "train",
                 "--reward", settings["data.reward"], "--schedule", "exit:2", "--samples", "2", "--limit", "3",
                 "--max-new-tokens", "4", "--out", str(tmp_path / "out.jsonl"), "--log-dir", str(tmp_path / "log")]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert summary["problems"] == 3 and summary["samples"] == 2 and len(rows) == 6
    assert summary["accuracy"] == pytest.approx(sum(row["reward"] for row in rows) / 6)
    assert summary["mean_depth"] == 2.0 and all(set(row["exit_depths"]) == {2} for row in rows)
    assert (tmp_path / "log/schedule.log").exists()


def test_evaluations_are_paired_and_greedy_ignores_the_seed(tmp_path, capsys):
    settings = dict(pair.split("=", 1) for pair in overrides(tmp_path))

    def texts(*more):
        out = tmp_path / "out.jsonl"
        main(["--model", settings["model.path"], "--data", settings["data.path"], "--split", "train",
              "--reward", settings["data.reward"], "--max-new-tokens", "6", "--out", str(out), *more])
        capsys.readouterr()
        return [json.loads(line)["text"] for line in out.read_text().splitlines()]

    assert texts() == texts() != texts("--seed", "1")
    assert texts("--temperature", "0") == texts("--temperature", "0", "--seed", "1")


@pytest.mark.parametrize("arguments, message", [
    (["--task", "nothing"], "nothing"), ([], "data.path"), (["--task", "calculator", "--schedule", "draft:1"], "draft"),
])
def test_refusals_name_the_setting(arguments, message, tmp_path):
    settings = dict(pair.split("=", 1) for pair in overrides(tmp_path))
    with pytest.raises(ValueError, match=message):
        main(["--model", settings["model.path"], *arguments])


@pytest.mark.parametrize("option", ["--out", "--log-dir"])
def test_outputs_that_cannot_be_written_are_refused_before_the_work(option, tmp_path, monkeypatch):
    """An --out that was a folder was found out after the whole evaluation, whose samples were lost."""
    monkeypatch.setattr("train.evaluate.load_policy", lambda *_, **__: pytest.fail("work began"))
    (tmp_path / "file").touch()
    place = tmp_path if option == "--out" else tmp_path / "file"
    with pytest.raises(ValueError, match=option):
        main(["--model", str(tmp_path), "--task", "calculator", option, str(place)])


def test_truncated_evaluation_is_what_it_says(tmp_path, capsys):
    """top-k 1 gives the texts of temperature 0; printed, in the summary and in the log."""
    settings = dict(pair.split("=", 1) for pair in overrides(tmp_path))
    (tmp_path / "model/generation_config.json").write_text('{"repetition_penalty": 1.05, "top_k": 50}')

    def found(*more):
        out = tmp_path / "out.jsonl"
        assert main(["--model", settings["model.path"], "--data", settings["data.path"], "--split", "train", "--reward",
                     settings["data.reward"], "--max-new-tokens", "6", "--out", str(out),
                     "--log-dir", str(tmp_path / "log"), *more]) == 0
        printed = capsys.readouterr()
        return ([json.loads(line)["text"] for line in out.read_text().splitlines()],
                json.loads(printed.out.splitlines()[-1]), printed.err)

    texts, summary, errors = found("--top-k", "1", "--temperature", "0.9")
    assert texts == found("--temperature", "0")[0]
    assert (summary["temperature"], summary["top_k"], summary["top_p"]) == (0.9, 1, 1.0)
    assert "sampling: temperature 0.9, top-k 1 (log-probs of the full softmax), no penalties" in errors
    assert "note: generation_config.json sets repetition_penalty = 1.05, top_k = 50 - not applied" in errors
    texts, summary, errors = found("--top-p", "0.5", "--temperature", "0.7")
    assert texts != found("--temperature", "0.7")[0] and (summary["top_k"], summary["top_p"]) == (0, 0.5)
    found("--top-k", "7", "--top-p", "0.5")
    header = read_checked(tmp_path / "log/schedule.log").header
    assert (header["top_k"], header["top_p"], header["temperature"]) == (7, 0.5, 1.0)


@pytest.mark.parametrize("arguments, named", [
    (["--top-k", "-1"], "top_k = -1"), (["--top-p", "0"], "top_p = 0.0"),
    (["--top-p", "0.9", "--temperature", "0"], "most likely token")])
def test_impossible_truncation_is_refused_before_weights_are_read(arguments, named, monkeypatch):
    monkeypatch.setattr("train.evaluate.load_policy", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(ValueError, match=named):
        main(["--model", "any", "--task", "calculator", *arguments])


@pytest.mark.parametrize("option, value", [("--samples", "0"), ("--samples", "1000000000"), ("--limit", "0"),
                                           ("--batch", "0"), ("--temperature", "-1"), ("--temperature", "inf")])
def test_impossible_numbers_are_usage_errors(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "any", "--task", "calculator", option, value])
    assert stopped.value.code == 2 and f"{option} = {float(value) if option == '--temperature' else value} must be" in (
        capsys.readouterr().err)
