"""Evaluation: k samples of each problem under a schedule, graded by the task's reward.

One function for the command `train.evaluate`, the demo and evaluations during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.engine import Completion, Engine, Request
from engine.sampler import Sampling
from rollout.collect import Cohort, collect, requests_of
from rollout.statistics import statistics
from train.prompts import PromptStream

Z95 = 1.959963984540054  # two-sided 95 % point of the normal distribution


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    summary: accuracy (mean reward), its 95 % interval, pass@k, lengths, depths, passes.
    rows: one dict a sample. cohort: log and texts, for whoever wants to replay it.
    """

    summary: dict
    rows: tuple[dict, ...]
    cohort: Cohort


def evaluate(engine: Engine, stream: PromptStream, sampling: Sampling, reward: Callable,
             decode: Callable[[Sequence[int]], str], *, max_new_tokens: int, samples: int = 1,
             limit: int | None = None,
             on_finish: Callable[[Completion], None] | None = None) -> Evaluation:
    """Generate `samples` texts for each of the first `limit` problems and grade them.

    Random numbers are keyed as in training at step 0, so every evaluation of one data set
    draws the same noise: before and after are paired. An unscored sample counts as reward 0.
    """
    prompts = stream.first(limit)
    requests = evaluation_requests(stream, max_new_tokens, samples, limit)
    examples = [prompt.example for prompt in prompts for _ in range(samples)]
    cohort = collect(engine, requests, examples, sampling, reward, decode, on_finish)
    rewards = [score.value or 0.0 for score in cohort.scores]
    rows = tuple(
        {"id": example.id, "sample": completion.request.sample, "prompt": example.prompt,
         "answer": example.answer, "text": text, "reward": value, "parts": score.parts,
         "tokens": len(completion.token_ids), "exit_depths": list(completion.exit_depths),
         "finish_reason": completion.finish_reason}
        for example, completion, text, value, score in zip(
            examples, cohort.log.completions, cohort.texts, rewards, cohort.scores, strict=True))
    groups = [rewards[at:at + samples] for at in range(0, len(rewards), samples)]
    summary = {"problems": len(groups), "samples": samples, "schedule": engine.schedule.text,
               "greedy": sampling.greedy, "temperature": sampling.temperature, "top_k": sampling.top_k,
               "top_p": sampling.top_p, "seed": sampling.seed, **score_summary(groups), **_rollout_summary(cohort)}
    return Evaluation(summary, rows, cohort)


def evaluation_requests(stream: PromptStream, max_new_tokens: int, samples: int,
                        limit: int | None) -> list[Request]:
    """The requests of an evaluation, from which an engine's capacity can be chosen."""
    return requests_of(stream.first(limit), step=0, dataset=stream.name, group_size=samples,
                       max_new_tokens=max_new_tokens)


def _rollout_summary(cohort: Cohort) -> dict:
    counted = statistics(cohort.log)
    lengths = [len(c.token_ids) for c in cohort.log.completions]
    cut = sum(c.finish_reason == "length" for c in cohort.log.completions)
    return {"unscored": sum(score.value is None for score in cohort.scores),
            "mean_length": sum(lengths) / len(lengths), "cut_by_length": cut / len(lengths),
            "mean_depth": counted.mean_depth, "depth_shares": list(counted.depth_shares),
            "passes_per_token": counted.passes_per_token,
            "tokens_per_second": sum(lengths) / cohort.seconds if cohort.seconds else None}


def score_summary(groups: Sequence[Sequence[float]]) -> dict:
    """Accuracy, 95 % interval and pass@k of rewards by problem, each problem k of them.

    The interval is over problems: samples of one problem are not independent. A problem counts
    as solved at reward 1 or more; pass@j = 1 - C(k - c, j) / C(k, j) for c solved of k (Chen et
    al. 2021), for j = 1, 2, 4, ... and k.
    """
    size, count = len(groups[0]), len(groups)
    means = [math.fsum(group) / size for group in groups]
    mean = math.fsum(means) / count
    sizes = sorted({size, *(2**power for power in range(size.bit_length()) if 2**power <= size)})
    solved = [sum(value >= 1 for value in group) for group in groups]
    passing = {f"pass@{j}": math.fsum(1 - math.comb(size - c, j) / math.comb(size, j)
                                      for c in solved) / count for j in sizes}
    low, high = _interval(means, mean)
    return {"accuracy": mean, "accuracy_low": low, "accuracy_high": high, **passing}


def _interval(means: Sequence[float], mean: float) -> tuple[float, float]:
    """Wilson's interval where every problem is right or wrong, else the normal one over problems."""
    count = len(means)
    if all(value in (0.0, 1.0) for value in means):
        centre = (mean + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
        half = Z95 / (1 + Z95**2 / count) * math.sqrt(
            mean * (1 - mean) / count + Z95**2 / (4 * count**2))
        return max(0.0, centre - half), min(1.0, centre + half)
    variance = math.fsum((value - mean) ** 2 for value in means) / max(count - 1, 1)
    half = Z95 * math.sqrt(variance / count)
    return mean - half, mean + half
