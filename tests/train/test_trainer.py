"""A step as its files show it: every prompt in one cohort, advantages relative to its own group."""

import json

import pytest
from tiny_run import overrides

from train.run import main


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
