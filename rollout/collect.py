"""A cohort: its requests, its engine run, its rewards, and its files.

The job of a cohort is a function of (step, cohort index, configuration) alone, so it is
the same wherever it runs. Knows no learner; advantages are handed in for the samples file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Completion, Engine, Request
from engine.sampler import Sampling
from engine.stopping import shown_text
from rollout.data import Example, uid
from rollout.log import ScheduleLog, from_rollout, write_log
from rollout.rewards import Sample, Score, score
from rollout.samples import write_rows
from rollout.structure import read_checked

LOG_FILE, SAMPLES_FILE = "schedule.log", "samples.jsonl"


@dataclass(frozen=True)
class Prompt:
    """An example as the engine takes it.

    occurrence: 0 the first time the example stands in a step's batch, 1 the second time, so
    that its samples get other random numbers.
    """

    example: Example
    token_ids: tuple[int, ...]
    group: int
    occurrence: int = 0


@dataclass(frozen=True)
class Cohort:
    """One cohort after its rollout.

    Attributes:
        log: the schedule log.
        texts: shown text of each sample. scores: reward of each sample.
        answers: reference answer of each sample.
        seconds: wall time of engine and reward (0 where it was read from files).
    """

    log: ScheduleLog
    texts: tuple[str, ...]
    scores: tuple[Score, ...]
    answers: tuple[str, ...]
    seconds: float = 0.0


def number_prompts(batch: Sequence[tuple[Example, Sequence[int]]]) -> list[Prompt]:
    """Number the groups of a step's batch and the repetitions of an example in it."""
    seen: dict[str, int] = {}
    prompts = []
    for group, (example, token_ids) in enumerate(batch):
        occurrence = seen.get(example.id, 0)
        seen[example.id] = occurrence + 1
        prompts.append(Prompt(example, tuple(token_ids), group, occurrence))
    return prompts


def requests_of(prompts: Sequence[Prompt], *, step: int, dataset: str, group_size: int,
                max_new_tokens: int) -> list[Request]:
    """`group_size` requests a prompt, uid = hash of (step, data set, example, sample index)."""
    return [
        Request(prompt.token_ids, max_new_tokens,
                uid(step, dataset, prompt.example.id, prompt.occurrence * group_size + index),
                dataset, prompt.example.id, prompt.group, index)
        for prompt in prompts for index in range(group_size)]


def collect(engine: Engine, requests: Sequence[Request], examples: Sequence[Example],
            sampling: Sampling, reward: Callable, decode: Callable[[Sequence[int]], str],
            on_finish: Callable[[Completion], None] | None = None) -> Cohort:
    """Generate and grade. `examples`: the example of each request."""
    began = time.perf_counter()
    log = from_rollout(engine.generate(requests, sampling, on_finish))
    texts = [shown_text(decode(c.token_ids), sampling.stop_strings) for c in log.completions]
    samples = [
        Sample(prompt=example.prompt, text=text, answer=example.answer, token_ids=c.token_ids,
               finish_reason=c.finish_reason, example_id=example.id, fields=example.fields)
        for example, text, c in zip(examples, texts, log.completions, strict=True)]
    scores = score(reward, samples)
    return Cohort(log, tuple(texts), tuple(scores), tuple(e.answer for e in examples),
                  time.perf_counter() - began)


def write_cohort(cohort: Cohort, advantages: Sequence[float], folder: str | Path) -> None:
    """Write the log and, beside it, one JSON object a sample."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, completion in enumerate(cohort.log.completions):
        request, scored = completion.request, cohort.scores[number]
        rows.append({
            "sequence": number, "dataset": request.dataset, "example": request.example,
            "group": request.group, "sample": request.sample, "text": cohort.texts[number],
            "answer": cohort.answers[number], "reward": scored.value, "parts": scored.parts,
            "advantage": advantages[number], "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids)})
    write_rows(rows, folder / SAMPLES_FILE)
    write_log(cohort.log, folder / LOG_FILE)


def read_cohort(folder: str | Path) -> Cohort:
    """Read what `write_cohort` wrote, the log's structure checked.

    Errors: ValueError or RuntimeError naming the file.
    """
    folder = Path(folder)
    log = read_checked(folder / LOG_FILE)
    file = folder / SAMPLES_FILE
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: rewards are read from it") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8
        raise RuntimeError(f"{file} is damaged: {error}") from None
    if len(rows) != len(log.completions):
        raise RuntimeError(f"{file} has {len(rows)} samples, the log has {len(log.completions)}")
    for number, (row, completion) in enumerate(zip(rows, log.completions, strict=True)):
        request = completion.request
        _check_row(row, f"{file}: line {number + 1}")
        named = (row.get("sequence"), row.get("example"), row.get("sample"))
        if named != (number, request.example, request.sample):
            raise RuntimeError(f"{file}: line {number + 1} is of sequence, example, sample {named}, "
                               f"the log has {(number, request.example, request.sample)}")
    return Cohort(log, tuple(row["text"] for row in rows),
                  tuple(Score(row["reward"], row["parts"]) for row in rows),
                  tuple(row["answer"] for row in rows))


def _check_row(row: object, where: str) -> None:
    """RuntimeError unless a sample read from a file has everything that training takes from it."""
    if not isinstance(row, dict):
        raise RuntimeError(f"{where} is no JSON object")
    absent = [name for name in ("text", "answer", "reward", "parts") if name not in row]
    if absent:
        raise RuntimeError(f"{where} has no {absent[0]!r}")
    if not (row["reward"] is None or _finite(row["reward"])):
        raise RuntimeError(f"{where}: reward = {row['reward']!r} must be a finite number, or null if unscored")
    if not isinstance(row["parts"], dict) or not all(map(_finite, row["parts"].values())):
        raise RuntimeError(f"{where}: parts = {row['parts']!r} must be an object of finite numbers")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
