"""Many sequences in one picture: the numbers behind it, which picture is chosen, and what its panels hold."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from schedule_logs import SCHEDULES, rollout_log

from engine import Capacity
from engine.plan import Pass
from rollout import draw_overview
from rollout.draw import draw, loop_colours, main
from rollout.log import write_log
from rollout.timeline import overview, timeline


@pytest.fixture(scope="module")
def many():
    """14 sequences of which at most 6 run at a time."""
    capacity = Capacity(max_sequences=6, max_rows=40, max_span=5, pages=400, page_size=4)
    return rollout_log("exit:mix=1:2,2:1,3:1", count=14, new=8, capacity=capacity)[1]


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, instead of files."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kind: (found.append(self), path.touch()))
    return found


def test_overview_by_hand():
    """dense, a prompt of 2 and 3 new tokens: the prompt's rows at loops 1, 2, 3, then two tokens more.
    After loop 3 the token just sampled has not run anything."""
    _, log = rollout_log("dense", count=1, new=3, stop_ids=())
    found = overview(log, [0])
    assert found.loop.tolist() == [[1, 2, 3] * 3]
    assert found.put_off.tolist() == [[2, 2, 1, 1, 1, 1, 1, 1, 1]]
    assert found.rows.tolist() == [[2, 0, 0], [0, 2, 0], [0, 0, 2], *[[1, 0, 0], [0, 1, 0], [0, 0, 1]] * 2]
    assert not found.older.any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_overview_against_the_timelines(schedule):
    """The cells of each sequence, one by one, summed up."""
    _, log = rollout_log(schedule)
    chosen = [3, 0, 4]
    found, loops = overview(log, chosen), log.header["loops"]
    rows, older = np.zeros_like(found.rows), np.zeros_like(found.older)
    for row, number in enumerate(chosen):
        line = timeline(log, number)
        loop, put_off = np.zeros(len(rows), int), np.full(len(rows), -1)
        tokens, deepest = line.prompt, 0
        for ran in line.ran:
            loop[ran.at] = ran.loop
            rows[ran.at, ran.loop - 1] += ran.stop - ran.start
            older[ran.at, ran.loop - 1] += ran.older
            deepest = ran.stop if ran.loop == loops else deepest
            tokens += sum(read.at == ran.at for read in line.read)
            put_off[ran.at] = tokens - deepest
        assert found.loop[row].tolist() == loop.tolist() and found.put_off[row].tolist() == put_off.tolist()
    assert (found.rows == rows).all() and (found.older == older).all() and rows.any()


def test_a_sequence_that_is_not_there_is_refused(many):
    for number in (14, -1):
        with pytest.raises(ValueError, match=f"sequence {number} is not in the log; it has 14"):
            overview(many, [0, number])


@pytest.mark.parametrize("options, panels", [
    ({}, "overview"), ({"sequences": range(12)}, 12), ({"sequences": range(13)}, "overview"), ({"view": "cells"}, 3),
    ({"sequences": [5, 1], "view": "overview"}, "overview"), ({"sequences": [5, 5, 1]}, 2)])
def test_the_number_of_sequences_chooses_the_picture(many, figures, tmp_path, options, panels):
    draw(many, tmp_path / "a.png", **options)
    [figure] = figures
    assert len(figure.axes) == (4 if panels == "overview" else panels)  # three panels and the scale of the last
    assert bool(figure.axes[-1].images) is False and bool(figure.axes[1].images) is (panels == "overview")


def test_few_sequences_are_drawn_cell_by_cell(figures, tmp_path):
    draw(rollout_log(SCHEDULES[2])[1], tmp_path / "a.png")
    assert len(figures[0].axes) == 3 and not any(axis.images for axis in figures[0].axes)


def test_more_cells_than_fit_are_refused(many, tmp_path):
    with pytest.raises(ValueError, match=r"at most 12 sequences, 13 were chosen.*--view overview"):
        draw(many, tmp_path / "a.png", range(13), view="cells")


def test_panels_hold_the_numbers_of_the_overview(many, figures, tmp_path):
    chosen, (first, last) = [9, *range(2, 8), 13], (4, 30)
    draw(many, tmp_path / "a.png", [*chosen, 9, 3], (first, last), "overview")  # named twice, drawn once
    rows_axis, loop_axis, put_off_axis, _ = figures[0].axes
    found = overview(many, chosen)
    palette = [to_rgb(colour) for colour in ("#ffffff", *loop_colours(3))]
    shown = loop_axis.images[0].get_array()
    assert shown.shape == (8, 26, 3)
    assert all(tuple(shown[r, c]) == palette[found.loop[r, first + c]] for r in range(8) for c in range(26))
    shown = put_off_axis.images[0].get_array()
    assert (shown.mask == (found.put_off[:, first:last] < 0)).all()
    assert (shown.filled(-1) == found.put_off[:, first:last]).all()
    for axis in (loop_axis, put_off_axis):
        assert axis.images[0].get_extent() == [3.5, 29.5, 7.5, -0.5] and axis.get_xlim() == (3.5, 29.5)
        assert [tick.get_text() for tick in axis.get_yticklabels()] == [str(number) for number in chosen]
    tops = [max(path[:, 1].max() for path in (c.get_paths()[0].vertices,)) for c in rows_axis.collections]
    assert max(tops) == found.rows[first:last].sum(1).max()
    assert rows_axis.get_title("left") == "rows of these sequences in each pass by loop; above the line: catch-up"


def test_rows_of_many_passes_are_averaged_and_say_so(monkeypatch, many, figures, tmp_path):
    """7 columns for all passes: the means times their numbers of passes are all rows."""
    monkeypatch.setattr(draw_overview, "COLUMNS", 7)
    draw(many, tmp_path / "a.png")
    axis = figures[0].axes[0]
    passes = sum(isinstance(event, Pass) for event in many.events)
    size = -(-passes // 7)
    assert f"rows in each pass by loop, mean of {size} passes" in axis.get_title("left")
    rows = overview(many, range(14)).rows
    means = draw_overview._means(rows, size)
    counts = [min(size, passes - at) for at in range(0, passes, size)]
    assert (means * np.array(counts)[:, None]).sum(0) == pytest.approx(rows.sum(0))


def test_the_command_takes_ranges(many, tmp_path, figures):
    write_log(many, tmp_path / "schedule.log")
    assert main([str(tmp_path / "schedule.log"), "--out", str(tmp_path / "a.png"), "--sequences", "9, 2:8,13",
                 "--passes", "4:30", "--view", "overview"]) == 0
    labels = [tick.get_text() for tick in figures[0].axes[1].get_yticklabels()]
    assert labels == ["9", "2", "3", "4", "5", "6", "7", "13"]
