"""`python -m rollout.draw LOG --out schedule.png`: a picture of a schedule log.

Passes on x, positions of chosen sequences on y. A filled cell ran in that pass, its colour is
its loop; a hatched one waited for the loop of that colour; spans that ran older cells for a
newer position are outlined; a dot marks a read-out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from models.cli import run_cli
from rollout.log import ScheduleLog
from rollout.statistics import statistics
from rollout.structure import read_checked
from rollout.timeline import Timeline, timeline

DEFAULT_SEQUENCES = 3
CROWDED = 80  # passes from which on lines get thinner
PROMPT_SHOWN = 16  # positions of a long prompt that are drawn, its last ones
OUTLINE, PROMPT = "#1a1a1a", "#eeeeee"
# One hue a loop, light to dark, told apart without colour vision too.
COLOURS = ("#f6c445", "#5ab4ac", "#3a6fb0", "#542788")


def draw(log: ScheduleLog, path: str | Path, sequences: Sequence[int] | None = None,
         passes: tuple[int, int] | None = None) -> None:
    """Draw `sequences` (default: the first three) of a log to `path`, a picture format by suffix.

    passes: first and one past the last pass shown; default: all that the sequences take part in.
    Errors: ValueError for an unknown sequence, an empty range or suffix.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    chosen = range(min(DEFAULT_SEQUENCES, len(log.completions))) if sequences is None else sequences
    lines = {number: timeline(log, number) for number in chosen}
    if not lines:
        raise ValueError("no sequence to draw: the log is empty or none was chosen")
    first = min(t.first for t in lines.values()) if passes is None else passes[0]
    last = max(t.last for t in lines.values()) if passes is None else passes[1]
    if not 0 <= first < last:
        raise ValueError(f"passes {first}:{last} is empty")
    colours = loop_colours(log.header["loops"])
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
        figure.text(0.075, 0.14 / (height + 1.45), caption(log), fontsize=9, color="#333333")
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, format=path.suffix.removeprefix(".") or "png")
        partial.rename(path)


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
    parser.add_argument("--sequences", metavar="N,N,...", help="sequences to show, from 0; default 0,1,2")
    parser.add_argument("--passes", metavar="A:B", help="passes A to B-1 only")
    options = parser.parse_args(argv)
    log = read_checked(options.log)
    draw(log, options.out, _integers(options.sequences, ",", "--sequences"),
         _integers(options.passes, ":", "--passes", 2))
    print(caption(log))
    return 0


def _integers(text: str | None, separator: str, option: str, count: int | None = None):
    if text is None:
        return None
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isascii() and part.isdecimal() for part in parts) or len(parts) != (count or len(parts)):
        raise ValueError(f"{option} {text!r}: expected integers with {separator!r} between them")
    return tuple(map(int, parts))


if __name__ == "__main__":
    run_cli(main)
