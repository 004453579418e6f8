"""Many sequences in one picture: a line a sequence, a column a pass.

Three panels over the same passes: rows by loop, with the part that is catch-up; the loop that each
sequence ran; how many positions of each have loops put off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.log import ScheduleLog
from rollout.timeline import overview

OUTLINE, ABSENT = "#1a1a1a", "#ffffff"
COLUMNS = 400  # of the first panel; more passes are averaged
WIDTH, LEFT, RIGHT = 11.0, 0.075, 0.93  # inches; the figure's share where panels begin and end
TOP, BOTTOM, GAP, ROWS = 0.62, 0.95, 0.42, 1.7  # inches: above, below, between panels; height of the first


def draw_overview(log: ScheduleLog, sequences: Sequence[int], passes: tuple[int, int], colours: Sequence[str],
                  caption: str):
    """A matplotlib figure of `sequences` in passes first..last-1. colours: one a loop."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, (first, last) = overview(log, sequences), passes
    lines = min(max(0.032 * len(sequences), 1.6), 5.5)
    height = TOP + ROWS + 2 * (GAP + lines) + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes, top = [], height - TOP
    for tall in (ROWS, lines, lines):
        place = (LEFT, (top - tall) / height, RIGHT - LEFT, tall / height)
        axes.append(figure.add_axes(place, sharex=axes[0] if axes else None))
        top -= tall + GAP
    window = slice(first, last)
    whose = "rows" if len(sequences) == len(log.completions) else "rows of these sequences"
    _rows(axes[0], f"{whose} in each pass by loop", first, found.rows[window], found.older[window], colours)
    extent = (first - 0.5, last - 0.5, len(sequences) - 0.5, -0.5)
    _loops(axes[1], extent, found.loop[:, window], colours)
    shown = _put_off(axes[2], extent, found.put_off[:, window])
    bar = figure.add_axes((RIGHT + 0.012, axes[2].get_position().y0, 0.01, lines / height))
    figure.colorbar(shown, cax=bar).ax.tick_params(labelsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8, labelbottom=axis is axes[-1])
        axis.set_xlim(first - 0.5, last - 0.5)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[1:]:
        axis.set_ylabel("sequence", fontsize=8)
        _name_sequences(axis, sequences)
    axes[-1].set_xlabel("pass")
    _legend(figure, colours)
    figure.text(LEFT, 0.14 / height, caption, fontsize=9, color="#333333")
    return figure


def _rows(axis, title: str, first: int, rows: np.ndarray, older: np.ndarray, colours: Sequence[str]) -> None:
    """Stacked by loop: rows of newest positions and of prompts, a line, catch-up rows."""
    size = -(-len(rows) // COLUMNS)
    edges = np.append(np.arange(first, first + len(rows), size), first + len(rows)) - 0.5
    newest, older = (_means(part, size) for part in (rows - older, older))
    bottom = np.zeros(len(newest))

    def steps(values: np.ndarray) -> np.ndarray:
        return np.append(values, values[-1:])

    for part in (newest, older):
        for loop, colour in enumerate(colours):
            axis.fill_between(edges, steps(bottom), steps(bottom + part[:, loop]), step="post", facecolor=colour,
                              linewidth=0)
            bottom = bottom + part[:, loop]
        if part is newest and older.any():
            axis.step(edges, steps(bottom), where="post", color=OUTLINE, linewidth=0.6)
    highest, usual = bottom.max(initial=1), 1.5 * np.quantile(bottom, 0.95)
    cut = bool(0 < usual < highest / 2)  # a few passes of prompts would flatten all others
    axis.set_ylim(0, usual if cut else 1.05 * highest)
    title += f", mean of {size} passes" * (size > 1) + "; above the line: catch-up" * bool(older.any())
    axis.set_title(title + f"; cut off: up to {highest:,.0f} rows" * cut, fontsize=9, loc="left")
    axis.set_ylabel("rows", fontsize=8)


def _means(parts: np.ndarray, size: int) -> np.ndarray:
    """Means of `size` rows each, the last of those that are left."""
    return np.stack([parts[at:at + size].mean(0) for at in range(0, len(parts), size)])


def _loops(axis, extent, loop: np.ndarray, colours: Sequence[str]) -> None:
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(colour) for colour in (ABSENT, *colours)])
    axis.imshow(palette[loop], extent=extent, aspect="auto", interpolation=_interpolation(loop))
    axis.set_title("loop that each sequence ran (white: not in the pass)", fontsize=9, loc="left")


def _put_off(axis, extent, put_off: np.ndarray):
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # From 0.15 on: a sequence with nothing put off is told apart from one that is absent.
    shades = ListedColormap(colormaps["BuPu"](np.linspace(0.15, 1, 256))).with_extremes(bad=ABSENT)
    shown = axis.imshow(np.ma.masked_less(put_off, 0), extent=extent, aspect="auto", cmap=shades, vmin=0,
                        interpolation=_interpolation(put_off))
    axis.set_title("positions that have not run every loop yet, after the pass", fontsize=9, loc="left")
    return shown


def _interpolation(cells: np.ndarray) -> str:
    """Sharp cells while each has a pixel of its own, else the mean of those that share one."""
    return "nearest" if cells.shape[1] < 1400 and cells.shape[0] < 700 else "antialiased"


def _name_sequences(axis, sequences: Sequence[int]) -> None:
    step = next(size for size in (1, 2, 4, 8, 10, 20, 50, 100, len(sequences)) if len(sequences) <= 12 * size)
    axis.set_yticks(range(0, len(sequences), step), [str(number) for number in sequences[::step]])


def _legend(figure, colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=f"loop {loop}") for loop, colour in enumerate(colours, 1)]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(LEFT - 0.005, 1.0), ncols=min(len(handles), 12),
                  frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.4, handletextpad=0.5)
