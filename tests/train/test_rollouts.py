"""Cohorts from logs: what may not be trained from."""

from dataclasses import replace

import pytest
from learner_cases import make_log
from tiny_models import tiny_model

from rollout.collect import Cohort, write_cohort
from rollout.rewards import Score
from train.rollouts import LoggedRollouts, cohort_folder


def test_logs_of_the_most_likely_tokens_are_refused(tmp_path):
    """Greedy tokens were trained on as if they had been drawn at temperature 1."""
    log = make_log(tiny_model())
    count = len(log.completions)
    for step, greedy in ((1, False), (2, True)):
        cohort = Cohort(replace(log, header=log.header | {"greedy": greedy}), ("",) * count,
                        (Score(0.0, {}),) * count, ("",) * count)
        write_cohort(cohort, (0.0,) * count, cohort_folder(tmp_path, step, 0))
    rollouts = LoggedRollouts(tmp_path, steps=2, cohorts=1)
    assert rollouts.cohort(1, 0).log == log
    with pytest.raises(ValueError, match=r"step-000002.*not samples of the policy"):
        rollouts.cohort(2, 0)
