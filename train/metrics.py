"""What a run tells: metrics.jsonl, trackers, one console line a step, a progress bar, curves.png.

metrics.jsonl is the record; it has every step, and floats written so that their bits survive.
Trackers (TensorBoard by default) get the same rows through accelerate. Knows names and
numbers, not what they mean.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.engine import Completion
from models.files import replacing
from train.config import TrainConfig
from train.config_file import to_table

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
# Shown in the console line where the row has them: label, metric, format.
CONSOLE = (("reward", "reward/mean", ".3f"), ("length", "rollout/length", ".1f"),
           ("depth", "rollout/mean_depth", ".2f"), ("entropy", "policy/entropy", ".3f"),
           ("|g|", "update/gradient_norm", ".3f"), ("ratio!=1", "ratio/not_one", ".0%"),
           ("passes/token", "rollout/passes_per_token", ".2f"),
           ("tokens/s", "rollout/tokens_per_second", ".0f"), ("s", "seconds/step", ".1f"))
# Panels of curves.png: title and the metrics in it.
PANELS = (("reward", ("reward/mean", "eval/accuracy")), ("entropy (nats)", ("policy/entropy",)),
          ("exit depth", ("rollout/mean_depth", "rollout/passes_per_token")),
          ("within-group std, zero-variance share", ("reward/within_group_std", "reward/zero_variance")),
          ("|dense - replay|, max", ("policy/dense_minus_replay_max",)),
          ("gradient norm", ("update/gradient_norm",)))


class RunMetrics:
    """Writes the metrics of one run folder.

    resume_step: last step of the loaded checkpoint (0: none); rows after it are set aside in
    `metrics.after-step-N.jsonl`. TensorBoard's older event files stay as they are; the new one
    begins with a purge mark, at which readers hide the events of the steps that are run again.
    """

    def __init__(self, folder: str | Path, config: TrainConfig, resume_step: int = 0):
        check_trackers(config)
        self.folder, self.config = Path(folder), config
        for name in (METRICS, SAMPLES):
            rewind(self.folder / name, resume_step)
        self.trackers = start_trackers(config, self.folder, resume_step)
        total, per_step = config.run.steps, config.rollout.prompts_per_step * config.rollout.group_size
        self.bar = tqdm(total=total, initial=resume_step, unit="step", file=sys.stderr, disable=None)
        self.samples, self.per_step = 0, per_step

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Record the metrics of a step everywhere."""
        whole = {"step": step, **row}
        with open(self.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({name: _finite(value) for name, value in whole.items()}) + "\n")
        self.bar.update(step - self.bar.n)
        if step % self.config.run.log_every == 0 or step == self.config.run.steps:
            parts = [f"{label} {row[name]:{form}}" for label, name, form in CONSOLE if name in row]
            self.say(f"step {step}: " + ", ".join(parts))
            for tracker in self.trackers:
                tracker.log({n: v for n, v in row.items() if math.isfinite(v)}, step=step)

    def say(self, text: str) -> None:
        """One line on the console, above the progress bar."""
        self.bar.clear()
        print(text, flush=True)
        self.bar.refresh()

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append some samples of a step to samples.jsonl."""
        with open(self.folder / SAMPLES, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n" for row in rows)

    def on_finish(self, completion: Completion) -> None:
        """Count finished samples of the current step in the progress bar."""
        self.samples = self.samples % self.per_step + 1
        self.bar.set_postfix_str(f"{self.samples}/{self.per_step} samples", refresh=False)

    def close(self) -> None:
        """Finish the trackers and draw curves.png."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.finish()
        if (self.folder / METRICS).exists():
            draw_curves(self.folder)


def _finite(value: float) -> float | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def rewind(file: Path, step: int) -> None:
    """Move the rows of later steps, and half a last line, into a file beside; nothing is lost.

    step 0: the run starts from the beginning and keeps no row, its row of step 0 neither.
    `metrics.jsonl` -> `metrics.after-step-N.jsonl`, or `.after-step-N.1.jsonl` where that exists.
    Rows are taken as bytes that end at a line feed: texts may hold U+2028, at which
    `str.splitlines` breaks too, and a kill may have cut a character in half.
    """
    if not file.exists():
        return
    kept, later = [], []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            number = math.inf  # cut in the middle of a write
        (kept if 0 < step >= number and line.endswith(b"\n") else later).append(line)
    if not later:
        return
    base, number = f"{file.stem}.after-step-{step}", 0
    while (aside := file.with_name(f"{base}{f'.{number}' if number else ''}.jsonl")).exists():
        number += 1
    aside.write_bytes(b"".join(later))
    with replacing(file) as partial:
        partial.write_bytes(b"".join(kept))


def check_trackers(config: TrainConfig) -> None:
    """ValueError for a tracker in `run.trackers` that is unknown or absent; nothing is started."""
    if not config.run.trackers:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    for name in config.run.trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"run.trackers: {name!r} is unknown; accelerate knows "
                             f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
        if not filter_trackers([name], logging_dir=config.run.dir):
            raise ValueError(f"run.trackers: the package of {name!r} is not installed")


def start_trackers(config: TrainConfig, folder: Path, resume_step: int) -> list:
    """The trackers that `run.trackers` names, which `check_trackers` has passed."""
    if not config.run.trackers:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=config.model.device == "cpu")  # trackers ask it which process writes
    started = []
    for name in config.run.trackers:
        kind = LOGGER_TYPE_TO_CLASS[name]
        if name == "tensorboard":
            tracker = kind("tensorboard", folder, purge_step=resume_step + 1 if resume_step else 0)
        elif kind.requires_logging_directory:
            tracker = kind(folder.name, folder)
        else:
            tracker = kind(folder.name)
        tracker.start()
        if name != "tensorboard":  # its own form of this writes a file a run, named by the clock
            tracker.store_init_configuration(to_table(config))
        started.append(tracker)
    return started


def draw_curves(folder: Path) -> None:
    """curves.png from metrics.jsonl: one panel a topic, steps on x."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    with replacing(folder / "curves.png") as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
