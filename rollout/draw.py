"""`python -m rollout.draw LOG --out schedule.png`: a picture of a schedule log.

Passes on x. `--view cells`: positions of a few sequences on y. A filled cell ran in that pass, its
colour is its loop; a hatched one waited for the loop of that colour; spans that ran older cells
for a newer position are outlined; a dot marks a read-out. `--view overview`: a line a sequence, for
many: rows of each pass, the loop that each sequence ran, and how many of its positions have loops
put off. Without --view: cells of up to 12 sequences, an overview of more; and without --sequences
too: cells of the first three of up to 12, an overview of all of more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.plan import Pass
from models.cli import run_cli
from models.files import check_picture, is_special, save_picture
from rollout.draw_overview import draw_overview
from rollout.log import ScheduleLog
from rollout.statistics import statistics
from rollout.structure import read_checked
from rollout.timeline import Timeline, timeline

DEFAULT_SEQUENCES = 3
MOST_BANDS = 12  # sequences up to which each gets a band of its own, cell by cell
VIEWS = ("cells", "overview")
CROWDED = 80  # passes from which on lines get thinner
PROMPT_SHOWN = 16  # positions of a long prompt that are drawn, its last ones
OUTLINE, PROMPT = "#1a1a1a", "#eeeeee"
# One hue a loop, light to dark, told apart without colour vision too.
COLOURS = ("#f6c445", "#5ab4ac", "#3a6fb0", "#542788")


def draw(log: ScheduleLog, path: str | Path, sequences: Sequence[int] | None = None,
         passes: tuple[int, int] | None = None, view: str | None = None) -> None:
    """Draw `sequences` of a log to `path`, a picture format by suffix.

    passes: first and one past the last pass shown; default: all that the sequences take part in.
    sequences, view: None chooses by their number, as the module's text says.
    Errors: ValueError for an unknown sequence or view, a range without a pass, a suffix, a path.
    """
    check_picture(path, "--out")
    count = len(log.completions)
    if view not in (None, *VIEWS):
        raise ValueError(f"view = {view!r} is unknown; use one of {', '.join(VIEWS)}")
    if sequences is None:
        few = view == "cells" or (view is None and count <= MOST_BANDS)
        sequences = range(min(DEFAULT_SEQUENCES, count) if few else count)
    sequences = list(dict.fromkeys(sequences))
    if not sequences:
        raise ValueError("no sequence to draw: the log is empty or none was chosen")
    overview = view == "overview" or (view is None and len(sequences) > MOST_BANDS)
    if not overview and len(sequences) > MOST_BANDS:
        raise ValueError(f"--view cells draws at most {MOST_BANDS} sequences, {len(sequences)} were chosen: choose "
                         "fewer, or --view overview")
    end = sum(isinstance(event, Pass) for event in log.events)
    lines = {} if overview else {number: timeline(log, number) for number in sequences}
    first, last = passes or (min((t.first for t in lines.values()), default=0),
                             max((t.last for t in lines.values()), default=end))
    if not 0 <= first < last or first >= end:
        raise ValueError(f"passes {first}:{last} is empty: the log has passes 0:{end}")
    colours, last = loop_colours(log.header["loops"]), min(last, end)
    if overview:
        figure = draw_overview(log, sequences, (first, last), colours, caption(log))
    else:
        figure = _draw_bands(lines, (first, last), colours, caption(log))
    save_picture(figure, path)


def _draw_bands(lines: dict[int, Timeline], passes: tuple[int, int], colours: Sequence[str], text: str):
    """A matplotlib figure with one band a sequence, cell by cell."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first, last = passes
    heights = [t.positions - _lowest(t) for t in lines.values()]
    height = min(max(0.085 * sum(heights) + 0.3 * len(heights), 2.0), 14.0)
    with rc_context({"hatch.linewidth": 0.7, "font.size": 9}):
        figure = Figure(figsize=(11, height + 1.45), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        figure.subplots_adjust(left=0.075, right=0.985, bottom=0.95 / (height + 1.45),
                               top=1 - 0.42 / (height + 1.45), hspace=0.22 * len(lines) / height)
        axes = figure.subplots(len(lines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (number, found) in zip(axes, lines.items(), strict=True):
            _draw_band(axis, number, found, colours, min(1.0, CROWDED / (last - first)))
        axes[-1].set_xlim(first - 0.5, last - 0.5)
        axes[-1].set_xlabel("pass")
        _legend(figure, colours)
        figure.text(0.075, 0.14 / (height + 1.45), text, fontsize=9, color="#333333")
    return figure


def caption(log: ScheduleLog) -> str:
    """Passes a token, rows a pass and cells computed, of all sequences of the log."""
    found, loops = statistics(log), log.header["loops"]
    return (f"{log.header['schedule']}+{log.header['catch_up']}, {found.sequences} sequences, {found.tokens:,} "
            f"tokens: {found.passes_per_token:.2f} passes per token ({loops} loops), "
            f"{found.rows_per_pass:.1f} rows per pass\n{found.rows:,} of dense's {found.dense_cells:,} cells "
            f"computed ({found.cell_share:.0%}), {found.catch_up_rows:,} of them in catch-up")


def loop_colours(loops: int) -> list[str]:
    """A colour for each loop 1..T: the palette, its last colour for loop T; more loops repeat it."""
    if loops <= len(COLOURS):
        return [*COLOURS[:loops - 1], COLOURS[-1]]
    return [COLOURS[i % len(COLOURS)] for i in range(loops)]


def _lowest(found: Timeline) -> int:
    return max(0, found.prompt - PROMPT_SHOWN)


def _draw_band(axis, number: int, found: Timeline, colours: Sequence[str], fine: float) -> None:
    """fine: factor of all line widths, so that outlines do not hide small cells."""
    from matplotlib.collections import PolyCollection

    def box(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
        return [(left - 0.5, low - 0.5), (right - 0.5, low - 0.5), (right - 0.5, high - 0.5), (left - 0.5, high - 0.5)]

    low = _lowest(found)
    axis.axhspan(low - 0.5, found.prompt - 0.5, color=PROMPT, linewidth=0, zorder=0)
    for loop, colour in enumerate(colours, 1):
        waits = [box(w.start, w.stop, w.position, w.position + 1) for w in found.waited if w.loop == loop]
        axis.add_collection(PolyCollection(waits, facecolor=colour, linewidth=0, alpha=0.12, zorder=1))
        axis.add_collection(PolyCollection(waits, facecolor="none", edgecolor=colour, hatch="/////",
                                           linewidth=0, alpha=0.6, zorder=1))
        cells = [box(r.at, r.at + 1, position, position + 1) for r in found.ran if r.loop == loop
                 for position in range(r.start, r.stop)]
        axis.add_collection(PolyCollection(cells, facecolor=colour, edgecolor="white", linewidth=0.3 * fine,
                                           zorder=2))
    caught = [box(r.at, r.at + 1, r.start, r.stop) for r in found.ran if r.older]
    axis.add_collection(PolyCollection(caught, facecolor="none", edgecolor=OUTLINE, linewidth=fine, zorder=3))
    axis.scatter([r.at for r in found.read], [r.position for r in found.read], s=5 * fine**2,
                 color="white", edgecolor=OUTLINE, linewidth=0.4 * fine, zorder=4)
    shown = "prompt" if low == 0 else f"prompt (last {found.prompt - low} of {found.prompt})"
    axis.text(0.997, (found.prompt - low) / 2 / (found.positions - low), shown, transform=axis.transAxes,
              ha="right", va="center", fontsize=8, color="#555555", zorder=5,
              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5})
    axis.set_ylim(low - 0.5, found.positions - 0.5)
    axis.set_ylabel(f"sequence {number}\nposition", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8)


def _legend(figure, colours: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=f"loop {loop}") for loop, colour in enumerate(colours, 1)]
    handles += [Patch(facecolor="none", edgecolor=colours[-1], hatch="/////", linewidth=0, alpha=0.6,
                      label="deferred: waits for the loop of that colour"),
                Patch(facecolor="none", edgecolor=OUTLINE, linewidth=1.0, label="catch-up span"),
                Line2D([], [], marker="o", markersize=3.5, color="none", markerfacecolor="white",
                       markeredgecolor=OUTLINE, markeredgewidth=0.6, label="read out")]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.0), ncols=len(handles),
                  frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.4, handletextpad=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m rollout.draw", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", metavar="LOG", help="a schedule log")
    parser.add_argument("--out", required=True, metavar="FILE", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--sequences", metavar="N,A:B,...", help="sequences to show, from 0; A:B is A to B-1")
    parser.add_argument("--view", choices=VIEWS, help="every cell, or a line a sequence; default by their number")
    parser.add_argument("--passes", metavar="A:B", help="passes A to B-1 only")
    options = parser.parse_args(argv)
    log = read_checked(options.log)
    draw(log, options.out, _sequences(options.sequences, len(log.completions)), _passes(options.passes), options.view)
    # What goes to a device may go to stdout: no text behind the picture there.
    print(caption(log), file=sys.stderr if is_special(options.out) else sys.stdout)
    return 0


def _sequences(text: str | None, count: int) -> list[int] | None:
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        ends = _integers(part, f"--sequences {text!r}: expected integers and ranges A:B with ',' between them")
        if len(ends) > 2:
            raise ValueError(f"--sequences {text!r}: {part.strip()!r} is no range A:B")
        if ends[-1] > count - (len(ends) == 1):
            raise ValueError(f"--sequences {text!r}: {part.strip()!r} is not in the log; it has {count} sequences, "
                             "numbered from 0")
        found += range(*ends) if len(ends) == 2 else ends
    return found


def _passes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    message = f"--passes {text!r}: expected two integers with ':' between them"
    ends = _integers(text, message)
    if len(ends) != 2:
        raise ValueError(message)
    return ends[0], ends[1]


def _integers(text: str, message: str) -> list[int]:
    parts = [part.strip() for part in text.split(":")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(message)
    return [int(part) for part in parts]


if __name__ == "__main__":
    run_cli(main)
