"""The picture of a benchmark: tokens a second by batch size, and the ratio to dense beneath."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from models.files import replacing

# Told apart without colour vision too.
COLOURS = ("#3a6fb0", "#d9822b", "#5ab4ac", "#542788", "#b2182b", "#7f7f7f")
MARKERS = "osD^vP"


def check_png(path: str) -> None:
    """ValueError unless a picture can be written there; nothing is."""
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise ValueError(f"--png {path!r}: the picture is a PNG; let its name end in .png")
    folder = target.absolute().parent
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--png {path!r}: must name a file in a folder that exists and can be written to")


def plot(rows: Sequence[dict], title: str, path: str) -> None:
    """Draw the results of `rollout.bench` to a PNG: a line an arm, on its fastest linear operator at
    each batch size; bars reach from the least to the most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    arms: dict[int, list[dict]] = {}
    for row in rows:
        if row["fastest"]:
            arms.setdefault(row["arm"], []).append(row)
    figure = Figure(figsize=(8, 7), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rate, ratio = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for arm, found in arms.items():
        found = sorted(found, key=lambda row: row["batch"])
        style = {"color": COLOURS[arm % len(COLOURS)], "marker": MARKERS[arm % len(MARKERS)], "markersize": 4,
                 "capsize": 2, "linewidth": 1.2, "label": found[0]["schedule"]}
        _line(rate, found, "tokens_per_s", style)
        _line(ratio, found, "ratio_to_dense", style)
    batches = sorted({row["batch"] for row in rows})
    for axis, label in ((rate, "tokens/s"), (ratio, "ratio to dense")):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    ratio.set_xscale("log")
    ratio.xaxis.set_minor_locator(NullLocator())
    ratio.set_xticks(batches, [str(batch) for batch in batches])
    ratio.set_xlabel("batch")
    rate.legend(fontsize=8)
    rate.set_title(title, fontsize=10)
    with replacing(path) as partial:
        figure.savefig(partial, format="png")


def _line(axis, rows: Sequence[dict], name: str, style: dict) -> None:
    values = [row[name] for row in rows]
    low = [row[name] - row[f"{name}_least"] for row in rows]
    high = [row[f"{name}_most"] - row[name] for row in rows]
    axis.errorbar([row["batch"] for row in rows], values, yerr=(low, high), **style)
