"""The picture of a schedule: drawn to a file whole, with what it claims in its caption."""

import os
import struct
import threading
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from schedule_logs import SCHEDULES, rollout_log

from rollout import draw as module
from rollout.draw import COLOURS, caption, draw, loop_colours, main
from rollout.log import write_log
from rollout.statistics import statistics


@pytest.fixture(scope="module")
def log():
    return rollout_log(SCHEDULES[2])[1]


def test_the_command_writes_a_picture_and_prints_the_caption(tmp_path, log, capsys):
    write_log(log, tmp_path / "schedule.log")
    out = tmp_path / "schedule.png"
    assert main([str(tmp_path / "schedule.log"), "--out", str(out), "--sequences", "0,2", "--passes", "0:12"]) == 0
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", data[16:20])[0] == 1650
    assert capsys.readouterr().out.strip() == caption(log)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["schedule.log", "schedule.png"]


def test_the_caption_says_what_the_schedule_cost(log):
    found = statistics(log)
    assert caption(log) == (
        f"exit:gate=0.5,min=1,max=3+lazy, 5 sequences, {found.tokens} tokens: {found.passes_per_token:.2f} passes "
        f"per token (3 loops), {found.rows_per_pass:.1f} rows per pass\n{found.rows} of dense's {found.dense_cells} "
        f"cells computed ({found.cell_share:.0%}), {found.catch_up_rows} of them in catch-up")


def test_every_cell_wait_catch_up_and_read_out_is_drawn(tmp_path, log, monkeypatch):
    """Counted in the axes: one polygon a cell, in the colour of its loop."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kind: (figures.append(self), path.touch()))
    draw(log, tmp_path / "a.png", range(5))
    [figure] = figures
    assert len(figure.axes) == 5
    for number, axis in enumerate(figure.axes):
        found = module.timeline(log, number)
        polygons = [len(c.get_paths()) for c in axis.collections[:-2]]
        for loop in (1, 2, 3):
            tint, hatch, cells = polygons[3 * (loop - 1):3 * loop]
            waits = sum(w.loop == loop for w in found.waited)
            assert tint == hatch == waits
            assert cells == sum(r.stop - r.start for r in found.ran if r.loop == loop)
        assert len(axis.collections[-2].get_paths()) == sum(r.older > 0 for r in found.ran)
        assert len(axis.collections[-1].get_offsets()) == len(found.read)
    assert any(w for n in range(5) for w in module.timeline(log, n).waited)


def test_a_long_prompt_shows_its_end_only(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kind: (figures.append(self), path.touch()))
    model_log = rollout_log("exit:2", count=8, new=3)[1]
    draw(model_log, tmp_path / "a.png", [7])
    [axis] = figures[0].axes
    assert axis.get_ylim() == (23 - 16 - 0.5, 23 + 2 - 0.5)
    assert axis.texts[0].get_text() == "prompt (last 16 of 23)"


def test_every_loop_has_a_colour():
    assert loop_colours(4) == list(COLOURS)
    assert loop_colours(1) == [COLOURS[-1]] and loop_colours(2) == [COLOURS[0], COLOURS[-1]]
    assert len(loop_colours(7)) == 7


def test_what_cannot_be_drawn_is_refused(tmp_path, log):
    for sequences, passes, message in (([9], None, "sequence 9 is not in the log"), ([], None, "no sequence"),
                                       ([0], (5, 5), "passes 5:5 is empty"),
                                       ([0], (900, 950), "passes 900:950 is empty: the log has passes 0:")):
        with pytest.raises(ValueError, match=message):
            draw(log, tmp_path / "a.png", sequences, passes)
    with pytest.raises(ValueError, match=r"'\.xyz' is not supported"):
        draw(log, tmp_path / "a.xyz")
    path = tmp_path / "schedule.log"
    write_log(log, path)
    for option, value, message in (
            ("--sequences", "1,x", "expected integers"), ("--sequences", "1:2:3", "'1:2:3' is no range"),
            ("--sequences", "5", "'5' is not in the log; it has 5"), ("--sequences", "0,3:6", "'3:6' is not in"),
            ("--passes", "5", "expected two integers"), ("--passes", "1:2:3", "expected two integers"),
            ("--out", str(tmp_path), "must name a file"), ("--out", str(tmp_path / "no/a.png"), "must name a file")):
        with pytest.raises(ValueError, match=f"{option} .*{message}"):
            main([str(path), "--out", str(tmp_path / "a.png"), option, value])
    with pytest.raises(ValueError, match="view = 'map' is unknown; use one of cells, overview"):
        draw(log, tmp_path / "a.png", view="map")
    assert [p.name for p in tmp_path.iterdir()] == ["schedule.log"]
    write_log(replace(log, peak_catch_up=99), path)
    with pytest.raises(RuntimeError, match="peak_catch_up"):
        main([str(path), "--out", str(tmp_path / "a.png")])


def test_a_device_gets_the_picture_and_stays_a_device(tmp_path, log, capsys):
    """`--out /dev/null` as root put a regular file in its place. The caption does not follow it into stdout."""
    write_log(log, tmp_path / "schedule.log")
    main([str(tmp_path / "schedule.log"), "--out", str(tmp_path / "a.png")])
    capsys.readouterr()
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    main([str(tmp_path / "schedule.log"), "--out", str(tmp_path / "pipe")])
    reader.join(timeout=20)
    assert (tmp_path / "pipe").is_fifo() and found == [(tmp_path / "a.png").read_bytes()]
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.strip() == caption(log)
