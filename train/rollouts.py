"""Where a step's cohorts come from: an engine that samples them, or the logs of an earlier run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Completion, Engine
from engine.sampler import Sampling
from rollout.collect import Cohort, collect, read_cohort, requests_of
from train.config import RolloutOptions
from train.prompts import PromptStream


def cohort_folder(logs: str | Path, step: int, cohort: int) -> Path:
    """Where log and samples of a cohort lie."""
    return Path(logs) / f"step-{step:06d}" / f"cohort-{cohort:03d}"


@dataclass(frozen=True)
class SampledRollouts:
    """Cohorts from an engine: cohort c of step n is the same job wherever it runs."""

    options: RolloutOptions
    engine: Engine
    stream: PromptStream
    sampling: Sampling
    reward: Callable
    decode: Callable[[Sequence[int]], str]

    @property
    def grading(self) -> str:
        """sha256 over what else decides tokens and rewards: stop ids, stop strings, the reward's file."""
        source = inspect.getsourcefile(self.reward)
        code = Path(source).read_bytes() if source else b""
        named = f"{self.sampling.stop_ids} {self.sampling.stop_strings} {self.reward.__name__}"
        return hashlib.sha256(named.encode() + code).hexdigest()

    def cohort(self, step: int, index: int,
               on_finish: Callable[[Completion], None] | None = None) -> Cohort:
        """Generate and grade cohort `index` of training step `step`."""
        options = self.options
        share = options.prompts_per_step // options.cohorts
        prompts = self.stream.step(step, options.prompts_per_step)[index * share:(index + 1) * share]
        requests = requests_of(prompts, step=step, dataset=self.stream.name,
                               group_size=options.group_size, max_new_tokens=options.max_new_tokens)
        examples = [prompt.example for prompt in prompts for _ in range(options.group_size)]
        return collect(self.engine, requests, examples, self.sampling, self.reward, self.decode,
                       on_finish)


class LoggedRollouts:
    """Cohorts read from `step-*/cohort-*` folders; nothing is sampled.

    Training step n takes the n-th step folder. Errors: ValueError when there are fewer step
    folders than steps, or other cohorts than the configuration names.
    """

    def __init__(self, folder: str | Path, steps: int, cohorts: int):
        self.digest = _digest_of(Path(folder))
        self.steps = sorted(path for path in Path(folder).glob("step-*") if path.is_dir())
        if len(self.steps) < steps:
            raise ValueError(f"run.from_logs = {str(folder)!r} holds {len(self.steps)} step folders, "
                             f"run.steps = {steps}: lower run.steps or name another folder")
        for path in self.steps[:steps]:
            found = len([child for child in path.glob("cohort-*") if child.is_dir()])
            if found != cohorts:
                raise ValueError(f"{path} holds {found} cohorts, rollout.cohorts = {cohorts}: set "
                                 f"rollout.cohorts = {found}")

    def cohort(self, step: int, index: int, on_finish=None) -> Cohort:
        """Read cohort `index` of training step `step`. ValueError for one that is no sample of the policy."""
        folder = self.steps[step - 1] / f"cohort-{index:03d}"
        cohort = read_cohort(folder)
        header = cohort.log.header
        if header["greedy"]:
            raise ValueError(f"{folder}: its tokens are the most likely ones, not samples of the policy: train from "
                             "logs of a temperature above 0")
        if header["top_k"] > 0 or header["top_p"] < 1:
            raise ValueError(f"{folder}: its tokens were sampled with top_k = {header['top_k']}, top_p = "
                             f"{header['top_p']}, but its log-probs are those of the full softmax: train from logs "
                             "made without")
        return cohort


def _digest_of(folder: Path) -> str:
    """sha256 over names and contents of every file below a folder."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        contents = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(folder)} {contents}\n".encode())
    return total.hexdigest()
