"""Cohorts from logs: what may not be trained from."""

from dataclasses import replace

import pytest
from learner_cases import make_log
from tiny_models import tiny_model

from rollout.collect import Cohort, write_cohort
from rollout.rewards import Score
from train.rollouts import LoggedRollouts, cohort_folder


def write(log, folder, step=1):
    count = len(log.completions)
    write_cohort(Cohort(log, ("",) * count, (Score(0.0, {}),) * count, ("",) * count), (0.0,) * count,
                 cohort_folder(folder, step, 0))


def test_logs_of_the_most_likely_tokens_are_refused(tmp_path):
    """Greedy tokens were trained on as if they had been drawn at temperature 1."""
    log = make_log(tiny_model())
    for step, greedy in ((1, False), (2, True)):
        write(replace(log, header=log.header | {"greedy": greedy}), tmp_path, step)
    rollouts = LoggedRollouts(tmp_path, steps=2, cohorts=1)
    assert rollouts.cohort(1, 0).log == log
    with pytest.raises(ValueError, match=r"step-000002.*not samples of the policy"):
        rollouts.cohort(2, 0)


@pytest.mark.parametrize("drawn, named", [({"top_k": 5}, "top_k = 5, top_p = 1.0"), ({"top_p": 0.9}, "top_p = 0.9")])
def test_logs_of_truncated_sampling_are_refused(tmp_path, drawn, named):
    """Tokens of a truncated softmax with log-probs of the full one give a biased ratio."""
    log = make_log(tiny_model())
    write(replace(log, header=log.header | drawn), tmp_path)
    with pytest.raises(ValueError, match=f"step-000001.*{named}.*log-probs are those of the full softmax"):
        LoggedRollouts(tmp_path, steps=1, cohorts=1).cohort(1, 0)
