"""Built-in tasks and the caller's own: data of each split, the words of a prompt, reward and stop strings."""

import dataclasses
import json
from pathlib import Path

import pytest

from models.tokenizer import load_tokenizer
from rollout import calculator, gsm8k
from rollout.calculator import build_tokenizer, parse
from rollout.data import Example, fit_prompts
from rollout.tasks import INSTRUCTION, load_task
from train.config import DataOptions

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"


class Letters:
    """A scripted tokenizer: an id is a code point, a chat is its messages between brackets."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def encode(self, text):
        return [ord(letter) for letter in text]

    def chat(self, messages):
        return "".join(f"[{message['role']}: {message['content']}]" for message in messages)


def text(ids):
    return "".join(map(chr, ids))


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_calculator_brings_its_data_reward_and_prompts(tmp_path):
    task = load_task(DataOptions(task="calculator"))
    train, test = task.data("train"), task.data("test")
    assert (train.name, len(train.examples), test.name, len(test.examples)) == (
        "calculator/train", 4822, "calculator/test", 464)
    assert task.reward is calculator.reward and task.stop_strings == ()
    build_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompts, skipped = fit_prompts(test, lambda example: task.encode(tokenizer, example), 9)
    assert (len(prompts), skipped) == (464, 0)
    assert prompts[0][0] == Example(id="120+15", prompt="120+15=", answer="135", fields={})
    assert prompts[0][1] == [0, 2, 3, 1, 11, 2, 6, 15]


def test_the_embedded_steps_are_right_distinct_and_held_out():
    task = load_task(DataOptions(task="calculator"))
    train, test = task.data("train").examples, task.data("test").examples
    assert not {example.id for example in train} & {example.id for example in test}
    for example in (*train, *test):
        assert eval(example.prompt[:-1]) == int(example.answer) and example.prompt == example.id + "="
        assert parse(calculator.answer_text(int(example.answer))) == int(example.answer)


def test_calculator_has_two_splits_a_limit_and_no_path():
    assert len(load_task(DataOptions(task="calculator", limit=3)).data("train").examples) == 3
    with pytest.raises(ValueError, match=r"holds neither dev\.jsonl"):
        load_task(DataOptions(task="calculator")).data("dev")
    for name in ("path", "eval_path"):
        with pytest.raises(ValueError, match="brings its own data"):
            load_task(DataOptions(task="calculator", **{name: "x.jsonl"}))


def test_gsm8k_asks_in_plain_text_without_a_chat_template():
    task = load_task(DataOptions(task="gsm8k", path=str(GSM8K)))
    example = task.data("train").examples[0]
    assert example.prompt.startswith("Natalia sold clips") and example.answer == "72"
    assert text(task.encode(Letters(), example)) == f"Question: {example.prompt}\n{INSTRUCTION}\nAnswer:"
    assert "#### N" in INSTRUCTION
    assert task.stop_strings == ("\nQuestion:",) and task.reward is gsm8k.reward


def test_gsm8k_asks_in_the_chat_template_where_there_is_one():
    task = load_task(DataOptions(task="gsm8k", path=str(GSM8K)))
    example = task.data("test").examples[0]
    assert text(task.encode(Letters("template"), example)) == f"[user: {example.prompt}\n{INSTRUCTION}]"


def test_gsm8k_reads_other_columns_and_a_limit(tmp_path):
    file = write(tmp_path / "train.jsonl", {"problem": "a", "gold": 1, "key": "x", "id": 0},
                 {"problem": "b", "gold": "#### 2", "key": "y", "id": 0})
    options = DataOptions(task="gsm8k", path=file, prompt_field="problem", answer_field="gold", id_field="key")
    assert [(e.id, e.prompt, e.answer) for e in load_task(options).data("train").examples] == [
        ("x", "a", "1"), ("y", "b", "2")]
    assert len(load_task(dataclasses.replace(options, limit=1)).data("train").examples) == 1


def test_own_data_with_a_reward_of_ones_own(tmp_path):
    chat = [{"role": "user", "content": "b"}]
    file = write(tmp_path / "mine.jsonl", {"q": "a", "k": "one"}, {"q": chat, "k": "two"})
    (tmp_path / "grade.py").write_text("def grade(samples): return [1.0] * len(samples)\n")
    task = load_task(DataOptions(path=file, reward=f"{tmp_path}/grade.py:grade", prompt_field="q", answer_field=None,
                                 id_field="k"))
    first, second = task.data("train").examples
    assert (first.id, first.answer, task.name, task.stop_strings) == ("one", "", "data", ())
    assert (text(task.encode(Letters(), first)), text(task.encode(Letters("t"), second))) == ("a", "[user: b]")
    assert task.reward([1, 2]) == [1.0, 1.0]
    assert len(load_task(DataOptions(path=file, reward="rollout.gsm8k:reward", prompt_field="q", answer_field=None,
                                     limit=1)).data("train").examples) == 1


@pytest.mark.parametrize("task", ["gsm8k", "calculator"])
def test_a_reward_that_is_named_takes_the_place_of_the_tasks(task, tmp_path):
    (tmp_path / "grade.py").write_text("def grade(samples): return [0.5] * len(samples)\n")
    path = str(GSM8K) if task == "gsm8k" else None
    assert load_task(DataOptions(task=task, path=path, reward=f"{tmp_path}/grade.py:grade")).reward([1]) == [0.5]


def test_evaluation_reads_its_own_path(tmp_path):
    train = write(tmp_path / "a.jsonl", {"question": "a", "answer": "1"})
    held_out = write(tmp_path / "b.jsonl", {"question": "b", "answer": "2"})
    task = load_task(DataOptions(task="gsm8k", path=train, eval_path=held_out))
    assert [task.data(split).examples[0].prompt for split in ("train", "test")] == ["a", "b"]
    with pytest.raises(ValueError, match=r"data\.eval_split = 'train' is the name of data\.split too"):
        load_task(DataOptions(task="gsm8k", path=train, eval_path=held_out, eval_split="train"))


def test_one_file_is_not_silently_both_splits(tmp_path):
    """Read whole for every split, it would be evaluated on although it was trained on."""
    file = write(tmp_path / "a.jsonl", {"question": "a", "answer": "1"})
    task = load_task(DataOptions(task="gsm8k", path=file))
    assert len(task.data("train").examples) == 1
    with pytest.raises(ValueError, match=r"is one file, read as the split 'train'.*data\.eval_path"):
        task.data("test")
    asked_for = load_task(DataOptions(task="gsm8k", path=file, eval_split="train"))
    assert len(asked_for.data("train").examples) == 1


@pytest.mark.parametrize(("options", "complaint"), [
    ({"task": "gsm"}, "data.task = 'gsm' is not built in; choose one of calculator, gsm8k"),
    ({"task": "gsm8k"}, "data.path is missing.*such as openai/gsm8k"),
    ({"task": "gsm8k", "path": "x.jsonl", "answer_field": None}, "data.answer_field = None"),
    ({"path": "x.jsonl"}, "data.reward is missing"),
    ({"reward": "rollout.gsm8k:reward"}, "data.path is missing"),
    ({"task": "calculator", "reward": "missing.py:grade"}, r"'missing\.py' not found"),
])
def test_settings_that_name_no_task_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_task(DataOptions(**options))
