"""Rewards: finding the function, checking its results, naming the sample that it fails on."""

import math
import sys
import textwrap

import numpy
import pytest
import torch

from rollout.rewards import Sample, Score, load_reward, score


def sample(text, example_id="0", answer="18"):
    return Sample(prompt="p", text=text, answer=answer, token_ids=(1,), finish_reason="stop", example_id=example_id,
                  fields={})


TWO = [sample("a"), sample("b", "1")]


@pytest.mark.parametrize(("result", "wanted"), [
    (1, Score(1.0, {})),
    (0.0, Score(0.0, {})),
    (0, Score(0.0, {})),
    (False, Score(0.0, {})),
    (True, Score(1.0, {})),
    (-2.5, Score(-2.5, {})),
    (None, Score(None, {})),
    (math.nan, Score(None, {})),
    (numpy.float32(0.5), Score(0.5, {})),
    (numpy.bool_(True), Score(1.0, {})),
    (torch.tensor(0.25), Score(0.25, {})),
    (torch.tensor(math.nan), Score(None, {})),
    ({"reward": 1.0, "format": True}, Score(1.0, {"format": 1.0})),
    ({"reward": None, "format": 0.5}, Score(None, {"format": 0.5})),
    ({"reward": 1, "length": math.nan, "x": None}, Score(1.0, {})),
    ({"correct": 1.0, "format": 0.25}, Score(1.25, {"correct": 1.0, "format": 0.25})),
    ({"correct": 1.0, "format": None}, Score(None, {"correct": 1.0})),
])
def test_every_kind_of_result(result, wanted):
    """0.0 and False are rewards; None and NaN are none. A dict without "reward" sums its parts."""
    found = score(lambda samples: [result], [sample("a")])[0]
    assert found == wanted
    assert type(found.value) in (float, type(None)) and all(type(part) is float for part in found.parts.values())


@pytest.mark.parametrize(("result", "complaint"), [
    (math.inf, "sample 1 .example '1'.: reward inf is infinite"),
    (-math.inf, "sample 1 .example '1'.: reward -inf is infinite"),
    (10**400, "sample 1 .example '1'.: reward inf is infinite"),
    ({"reward": 1.0, "x": math.inf}, "sample 1 .example '1'., part 'x': reward inf"),
    ({"x": 1e308, "y": 1e308}, "sample 1 .example '1'., sum of the parts: reward inf"),
    ("1.0", "sample 1 .example '1'.: reward '1.0' is a str"),
    ([1.0], r"sample 1 .example '1'.: reward \[1.0\] is a list"),
    ({}, "sample 1 .example '1'.: reward {}"),
    ({1: 2.0}, "sample 1 .example '1'.: reward {1: 2.0}"),
])
def test_a_result_that_is_no_reward_names_the_sample(result, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        score(lambda samples: [0.0, result], TWO)


def test_scores_come_one_a_sample_in_order():
    """A sample without an answer must not shift or drop the scores of the others."""
    texts = ["1", "none", "3", "4"]
    scores = score(lambda samples: [float(s.text) if s.text.isdigit() else None for s in samples],
                   [sample(text, str(i)) for i, text in enumerate(texts)])
    assert [found.value for found in scores] == [1.0, None, 3.0, 4.0]


def test_arrays_and_tuples_are_lists_too():
    for results in ((1.0, 2.0), numpy.array([1.0, 2.0]), torch.tensor([1.0, 2.0])):
        assert [found.value for found in score(lambda samples, results=results: results, TWO)] == [1.0, 2.0]


@pytest.mark.parametrize("results", [[1.0], [1.0, 1.0, 1.0], []])
def test_another_number_of_results_is_refused(results):
    with pytest.raises(RuntimeError, match=f"returned {len(results)} results for 2 samples"):
        score(lambda samples: results, TWO)


@pytest.mark.parametrize("results", [None, 1.0, {"a": 1.0, "b": 1.0}, "ab", {1.0, 2.0}, numpy.float64(1.0),
                                     iter([1.0, 2.0])])
def test_what_is_no_list_is_refused(results):
    with pytest.raises(RuntimeError, match="it must return a list"):
        score(lambda samples: results, TWO)


def test_no_samples_means_no_call():
    assert score(None, []) == []


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit("no")])
def test_an_exception_names_the_sample_that_caused_it(error):
    def reward(samples):
        for one in samples:
            if one.text == "b":
                raise error
        return [0.0] * len(samples)

    with pytest.raises(RuntimeError, match=rf"on sample 1 \(example '1'\): {type(error).__name__}: no") as caught:
        score(reward, TWO)
    assert caught.value.__cause__ is error


def test_an_exception_of_the_batch_alone_is_reported_as_such():
    def reward(samples):
        if len(samples) > 1:
            raise ValueError("one at a time")
        return [0.0]

    with pytest.raises(RuntimeError, match=r"batch of 2 samples, though on none .*one at a time") as caught:
        score(reward, TWO)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture
def reward_file(tmp_path):
    def write(source, name="rewards.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(source))
        return file
    return write


def test_a_file_is_loaded_by_path_and_leaves_imports_alone(reward_file):
    """The file is called json.py and defines a dataclass: neither may disturb, or need, a module of that name."""
    import json

    path_before = list(sys.path)
    file = reward_file("""
        from __future__ import annotations
        import pickle
        from dataclasses import dataclass

        @dataclass
        class Grade:
            value: float

        def reward(samples):
            return [pickle.loads(pickle.dumps(Grade(len(s.text)))).value for s in samples]
        """, name="json.py")
    assert [found.value for found in score(load_reward(f"{file}:reward"), [sample("abc")])] == [3.0]
    assert sys.path == path_before and sys.modules["json"] is json


def test_two_files_of_the_same_name_are_two_modules(tmp_path):
    rewards = []
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"VALUE = {value}\ndef reward(samples): return [VALUE]\n")
        rewards.append(load_reward(f"{tmp_path / folder / 'r.py'}:reward"))
    assert [score(reward, [sample("x")])[0].value for reward in rewards] == [1.0, 2.0]
    assert rewards[0].__module__ != rewards[1].__module__


def test_a_relative_path_is_the_callers(reward_file, monkeypatch):
    monkeypatch.chdir(reward_file("def reward(samples): return [1.0]").parent)
    assert load_reward("rewards.py:reward")([]) == [1.0]


def test_a_module_is_imported():
    assert load_reward("rollout.rewards:score") is score


@pytest.mark.parametrize(("source", "complaint"), [
    ("def reward(samples):\n    return [\n", r"SyntaxError in line \d"),
    ("x = 1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
    ("import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
    ("raise SystemExit(0)", "cannot be loaded: SystemExit"),
    ("def other(samples): pass\ndef _own(): pass", "has no 'reward'; its functions are other$"),
    ("reward = 3", "'reward' is a int, not a function"),
])
def test_a_file_that_does_not_work_is_refused_by_name(reward_file, source, complaint):
    file = reward_file(source)
    before = set(sys.modules)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_reward(f"{file}:reward")
    assert str(file) in str(caught.value)
    if "cannot be loaded" in str(caught.value):
        assert not [name for name in set(sys.modules) - before if name.startswith("reprise_reward_")]


@pytest.mark.parametrize(("spec", "complaint"), [
    ("missing.py:reward", r"'missing\.py' not found \(looked at /"),
    ("folder/reward.txt:reward", "not found"),
    ("no_such_module:reward", "module 'no_such_module' not found.*path/file.py:function"),
    ("rollout.no_such:reward", "no module 'rollout.no_such'"),
    ("rollout.rewards:missing", "has no 'missing'; its functions are load_reward, score$"),
    ("rewards.py", "write path/file.py:function"),
    (":reward", "write path/file.py:function"),
    ("rewards.py:", "write path/file.py:function"),
    ("rewards.py:a b", "write path/file.py:function"),
])
def test_a_spec_that_names_nothing_is_refused(spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_reward(spec)


def test_a_module_whose_own_import_is_missing_is_not_called_missing(reward_file, monkeypatch):
    file = reward_file("import no_such_module", name="broken_reward_module.py")
    monkeypatch.syspath_prepend(str(file.parent))
    with pytest.raises(ValueError, match=r"'broken_reward_module' cannot be imported.*No module named 'no_such"):
        load_reward("broken_reward_module:reward")
    file.write_text("x = 1 / 0")
    with pytest.raises(ValueError, match="'broken_reward_module' cannot be imported: ZeroDivisionError"):
        load_reward("broken_reward_module:reward")


def test_a_file_that_is_no_python_file_is_refused(reward_file):
    file = reward_file("def reward(samples): pass", name="reward.txt")
    with pytest.raises(ValueError, match=r"must end with \.py"):
        load_reward(f"{file}:reward")
