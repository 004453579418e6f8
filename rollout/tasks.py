"""Tasks: where prompts come from, how they are worded and what grades the responses.

gsm8k       GSM8K's problems from a path or the hub name "openai/gsm8k". The prompt is the question
            and a request to end with `#### N`: as a user's message in the checkpoint's chat
            template where it has one, else as "Question: ...\\nAnswer:". A response ends where it
            begins a question of its own ("\\nQuestion:").
calculator  the embedded steps (`rollout/calculator.py`), splits "train" and "test".
(no task)   the caller's data and reward. A text is the prompt as it stands, messages go through the
            chat template.

A reward that the caller names takes the place of the task's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.tokenizer import Tokenizer
from rollout import calculator, gsm8k
from rollout.data import DataSet, Example, load_data
from rollout.rewards import Reward, load_reward

NAMES = ("calculator", "gsm8k")
EMBEDDED = Path(__file__).parent / "embedded"
INSTRUCTION = "Solve the problem step by step. End with a line of the form #### N, where N is the answer as a number."


class TaskOptions(Protocol):
    """The settings that name a task; the section `data` of a run's configuration has them all.

    task: a built-in task, or None. path: file, folder or hub name of the data. split: the part of it
    that is trained on. eval_path, eval_split: the same for evaluation; without an eval_path the data
    of `path`. prompt_field, answer_field, id_field: columns; under gsm8k the default "prompt" stands
    for GSM8K's own "question". reward: of `load_reward`, or None. limit: first so many rows, or None.
    """

    task: str | None
    path: str | None
    split: str
    eval_path: str | None
    eval_split: str
    prompt_field: str
    answer_field: str | None
    id_field: str
    reward: str | None
    limit: int | None


@dataclass(frozen=True)
class Task:
    """Everything a run needs to know of its task.

    Attributes:
        name: the built-in task's, or "data".
        data: split -> its data set. Errors: ValueError naming file and row, or the missing split.
        encode: the prompt of an example as token ids. Errors: ValueError of the tokenizer.
        reward: grades samples.
        stop_strings: text that ends a response besides the stop ids.
    """

    name: str
    data: Callable[[str], DataSet]
    encode: Callable[[Tokenizer, Example], list[int]]
    reward: Reward
    stop_strings: tuple[str, ...] = ()


def load_task(options: TaskOptions) -> Task:
    """The task that `options` name. The reward is loaded now, the data when a split is asked for.

    Errors: ValueError naming the setting at fault.
    """
    reward = None if options.reward is None else load_reward(options.reward)
    if options.task == "calculator":
        if options.path is not None or options.eval_path is not None:
            raise ValueError("data.task = 'calculator' brings its own data: leave out data.path and data.eval_path, or "
                             "the task")
        return Task("calculator", lambda split: _embedded(options, split), _encode_calculator,
                    reward or calculator.reward)
    if options.task is not None and options.task not in NAMES:
        raise ValueError(f"data.task = {options.task!r} is not built in; choose one of {', '.join(NAMES)}, or leave it "
                         "out and name data.path and data.reward")
    if options.path is None:
        raise ValueError("data.path is missing: name a .jsonl or .parquet file, a folder of them, or a hub data set"
                         + (f" such as {gsm8k.HUB_NAME}" if options.task == "gsm8k" else ""))
    if options.eval_path is not None and options.eval_split == options.split:
        raise ValueError(f"data.eval_split = {options.eval_split!r} is the name of data.split too, so it cannot tell "
                         "data.eval_path from data.path; give the two splits two names")
    if options.task == "gsm8k":
        if options.answer_field is None:
            raise ValueError("data.answer_field = None: gsm8k compares with answers; name the column that holds them")
        return Task("gsm8k", lambda split: _gsm8k(options, split), _encode_gsm8k, reward or gsm8k.reward,
                    gsm8k.STOP_STRINGS)
    if reward is None:
        raise ValueError("data.reward is missing: name a function (path/file.py:function) that grades the responses")
    return Task("data", lambda split: _own(options, split), encode_prompt, reward)


def encode_prompt(tokenizer: Tokenizer, example: Example) -> list[int]:
    """Token ids of a prompt as the data gives it: text as it stands, messages in the chat template."""
    prompt = example.prompt
    return tokenizer.encode(prompt if isinstance(prompt, str) else tokenizer.chat(prompt))


def _encode_gsm8k(tokenizer: Tokenizer, example: Example) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"Question: {example.prompt}\n{INSTRUCTION}\nAnswer:")
    message = {"role": "user", "content": f"{example.prompt}\n{INSTRUCTION}"}
    return tokenizer.encode(tokenizer.chat([message]))


def _encode_calculator(tokenizer: Tokenizer, example: Example) -> list[int]:
    return tokenizer.encode("\n" + example.prompt)


def _embedded(options: TaskOptions, split: str) -> DataSet:
    return load_data(EMBEDDED / "calculator", split=split, limit=options.limit, name=f"calculator/{split}")


def _gsm8k(options: TaskOptions, split: str) -> DataSet:
    question = "question" if options.prompt_field == "prompt" else options.prompt_field
    return gsm8k.load(_place(options, split), split, prompt_field=question, answer_field=options.answer_field,
                      id_field=options.id_field, limit=options.limit)


def _own(options: TaskOptions, split: str) -> DataSet:
    return load_data(_place(options, split), split=split, prompt_field=options.prompt_field,
                     answer_field=options.answer_field, id_field=options.id_field, limit=options.limit)


def _place(options: TaskOptions, split: str) -> str:
    """Where a split lies: eval_path for the evaluation's own, else path."""
    if split == options.eval_split and options.eval_path is not None:
        return options.eval_path
    if split != options.split and Path(options.path).is_file():
        # Reading it all the same would evaluate on what was trained on.
        raise ValueError(f"data.path = {options.path!r} is one file, read as the split {options.split!r}; for "
                         f"{split!r} name another file with data.eval_path, or a folder that holds both")
    return options.path
