"""The probe's table as a picture: entropy, agreement with the last loop and exit probability by loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.files import save_picture

LABELLED = 12  # loops up to which each bar has its number written on it
COLOUR, LAST = "#3a6fb0", "#542788"


def plot(path: str | Path, title: str, entropy: Sequence[float], agreement: Sequence[float],
         exits: Sequence[float]) -> None:
    """One panel a quantity, one bar a loop, the last loop's darker.

    entropy: mean, in nats. agreement: share of tokens whose most likely next token is the last
    loop's. exits: mean exit probability, of the gate as it is.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loops = len(entropy)
    panels = (("mean entropy of the next token (nats)", entropy, "{:.2f}", None),
              (f"most likely token as at loop {loops} (%)", [100 * share for share in agreement], "{:.1f}", 100),
              ("mean exit probability of the gate (%)", [100 * share for share in exits], "{:.1f}", 100))
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 3.4), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        figure.subplots_adjust(left=0.04, right=0.985, bottom=0.14, top=0.8, wspace=0.16)
        figure.text(0.04, 0.94, title, fontsize=9, color="#333333")
        for axis, (heading, values, form, top) in zip(figure.subplots(1, 3), panels, strict=True):
            places = range(1, loops + 1)
            bars = axis.bar(places, values, width=0.72, color=[*[COLOUR] * (loops - 1), LAST])
            if loops <= LABELLED:
                axis.bar_label(bars, [form.format(value) for value in values], padding=2, fontsize=8)
                axis.set_xticks(places)
            else:
                axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_ylim(0, 1.08 * (top or max(values) or 1))
            axis.set_title(heading, fontsize=9, loc="left")
            axis.set_xlabel("loop")
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        save_picture(figure, path)
