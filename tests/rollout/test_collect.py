"""A cohort's files: what was written is read back, and nothing else is."""

import json

import pytest
import torch
from tiny_models import tiny_model

from engine.engine import Engine
from engine.sampler import Sampling
from rollout.collect import SAMPLES_FILE, collect, number_prompts, read_cohort, requests_of, write_cohort
from rollout.data import Example


@pytest.fixture
def folder(tmp_path):
    """The files of a cohort of two samples, one of them unscored."""
    example = Example(id="a", prompt="x", answer="7", fields={})
    requests = requests_of(number_prompts([(example, (1, 2))]), step=1, dataset="d", group_size=2, max_new_tokens=3)
    cohort = collect(Engine(tiny_model(dtype=torch.float32), "exit:1"), requests, [example] * 2, Sampling(),
                     lambda samples: [{"reward": 0.5, "part": 1.0}, None], lambda ids: "text")
    write_cohort(cohort, (0.0, 0.0), tmp_path)
    return tmp_path


def test_a_cohort_is_read_as_it_was_written(folder):
    cohort = read_cohort(folder)
    assert [score.value for score in cohort.scores] == [0.5, None] and cohort.scores[0].parts == {"part": 1.0}
    assert cohort.texts == ("text", "text") and cohort.answers == ("7", "7")


@pytest.mark.parametrize("change, named", [
    ({"reward": "0.5"}, "line 1: reward = '0.5'"), ({"reward": float("inf")}, "line 1: reward = inf"),
    ({"reward": float("nan")}, "line 1: reward = nan"), ({"parts": [1]}, r"line 1: parts = \[1\]"),
    ({"parts": {"a": None}}, "line 1: parts = "), ("text", "line 1 has no 'text'"),
    ("reward", "line 1 has no 'reward'"), ([], "line 1 is no JSON object"), (b"\xff", "is damaged: 'utf-8'"),
])
def test_a_damaged_sample_is_refused_by_file_and_line(folder, change, named):
    """Training from logs ended in a KeyError, AttributeError or TypeError that named no file."""
    file = folder / SAMPLES_FILE
    first, second = file.read_bytes().splitlines(keepends=True)
    row = json.loads(first)
    if isinstance(change, dict):
        row |= change
    elif isinstance(change, str):
        del row[change]
    else:
        row = change
    file.write_bytes((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" + second)
    with pytest.raises(RuntimeError, match=named) as caught:
        read_cohort(folder)
    assert str(file) in str(caught.value)
