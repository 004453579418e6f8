"""A step as its files show it: every prompt in one cohort, advantages relative to its own group."""

import json
from dataclasses import replace

import pytest
from learner_cases import make_log
from tiny_models import tiny_model
from tiny_run import overrides

from rollout.collect import Cohort
from rollout.rewards import Score
from train.advantages import group_advantages
from train.run import main
from train.trainer import make_batches


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Samples of step 1: two cohorts of two prompts, four samples each."""
    folder = tmp_path_factory.mktemp("trainer")
    assert main(overrides(folder, **{"run.steps": 1})) == 0
    return [[json.loads(line) for line in
             (folder / f"run/logs/step-000001/cohort-{cohort:03d}/samples.jsonl").read_text().splitlines()]
            for cohort in (0, 1)]


def test_cohorts_share_the_steps_prompts_among_them(samples):
    found = [[row["example"] for row in cohort] for cohort in samples]
    assert [len(cohort) for cohort in found] == [8, 8]
    assert len(set(found[0])) == len(set(found[1])) == 2 and not set(found[0]) & set(found[1])
    assert [[row["group"] for row in cohort] for cohort in samples] == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]


def test_advantages_are_relative_to_the_own_group(samples):
    """Reward minus the group's mean, over its sample standard deviation plus 1e-6."""
    rows = samples[0] + samples[1]
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    for group in range(4):
        own = [row for row in rows if row["group"] == group]
        rewards = [row["reward"] for row in own]
        mean = sum(rewards) / 4
        std = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
        for row in own:
            wanted = (row["reward"] - mean) / (std + 1e-6) if std else 0.0
            assert row["advantage"] == pytest.approx(wanted, abs=1e-12)


def reasons(log, *found):
    """The log with other finish reasons; tokens and stop ids stay."""
    return replace(log, completions=tuple(
        replace(done, finish_reason=reason) for done, reason in zip(log.completions, found, strict=True)))


def test_the_finish_reason_alone_says_what_is_cut_by_length():
    """A sample whose last token happens to be a stop id elsewhere was cut all the same, and one that ended on
    a second stop id was not: the last token decided in other tools. Cut samples keep their advantage and
    their place in the baseline: (1 + 0 + 0 + 3) / 4 = 1."""
    logs = [make_log(tiny_model(), cohort) for cohort in (0, 1)]
    logs = [reasons(logs[0], "length", "stop", "length", "stop_string"), reasons(logs[1], *["length"] * 4)]
    rewards = [1.0, 0.0, 0.0, 3.0, 2.0, None, 2.0, 2.0]
    cohorts = [Cohort(log, ("",) * 4, tuple(Score(r, {}) for r in rewards[4 * i:4 * i + 4]), ("",) * 4)
               for i, log in enumerate(logs)]
    advantages = group_advantages(rewards, [0] * 4 + [1] * 4, "none")
    plain = make_batches(cohorts, advantages)
    assert [b.trained for b in plain] == [(True,) * 4, (True, False, True, True)]
    masked = make_batches(cohorts, advantages, mask_truncated=True)
    assert [b.trained for b in masked] == [(False, True, False, True), (False,) * 4]
    for batches in (plain, masked):
        assert [b.advantages for b in batches] == [(0.0, -1.0, -1.0, 2.0), (0.0,) * 4]


def test_a_run_that_masks_trains_on_the_others_alone(tmp_path):
    assert main(overrides(tmp_path, **{"run.steps": 1, "learner.mask_truncated": "true", "rollout.stop": "a,e,i,o,u",
                                       "learner.denominator": "sequences", "learner.advantage": "leave-one-out",
                                       "rollout.max_new_tokens": 30})) == 0
    [metrics] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for file in sorted((tmp_path / "run/logs").rglob("samples.jsonl"))
            for line in file.read_text().splitlines()]
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert 0 < len(cut) < len(rows) and metrics["rollout/cut_by_length"] == len(cut) / len(rows)
    assert metrics["update/trained_tokens"] == sum(row["tokens"] for row in rows if row not in cut)
    for row in rows:
        others = [r["reward"] for r in rows if r["group"] == row["group"] and r["sample"] != row["sample"]]
        assert row["advantage"] == pytest.approx(row["reward"] - sum(others) / 3, abs=1e-12)
    trained = [row for row in rows if row not in cut]  # on policy, each of their tokens costs -advantage
    wanted = -sum(row["advantage"] for row in trained) / len(trained)
    assert metrics["loss/loss"] == pytest.approx(wanted, abs=1e-7)
    by_token = -sum(row["advantage"] * row["tokens"] for row in trained) / sum(row["tokens"] for row in trained)
    assert abs(by_token - wanted) > 0.01
