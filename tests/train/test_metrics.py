import json
import math
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config import DataOptions, ModelOptions, RunOptions, TrainConfig
from train.metrics import RunMetrics, rewind


def config(folder, **run):
    return TrainConfig(
        model=ModelOptions(path="m"),
        data=DataOptions(task="calculator"),
        run=RunOptions(dir=str(folder), steps=9, **{"trackers": (), **run}),
    )


def metrics(folder, resume_step=0, **run):
    return RunMetrics(folder, config(folder, **run), resume_step)


def steps(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_rows_keep_the_bits_of_their_floats(tmp_path):
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": -0.0, "d": 1.7976931348623157e308, "e": 1 / 3}
    metrics(tmp_path).log(1, values)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row.pop("step") == 1
    assert {name: struct.pack("d", value) for name, value in row.items()} == {
        name: struct.pack("d", value) for name, value in values.items()
    }


def test_what_is_not_finite_is_null_and_ints_stay_ints(tmp_path):
    """NaN is no JSON; a reader of another language would refuse the whole line."""
    metrics(tmp_path).log(3, {"nan": math.nan, "inf": -math.inf, "count": 7})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "nan": null, "inf": null, "count": 7}\n'


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    writer = metrics(tmp_path)
    for step in (1, 2):
        writer.log(step, {"x": 1.0})
        assert steps(tmp_path / "metrics.jsonl") == list(range(1, step + 1))


def test_the_console_shows_every_log_every_th_step_and_the_last(tmp_path, capsys):
    writer = metrics(tmp_path, log_every=4)
    for step in range(1, 10):
        writer.log(step, {"reward/mean": step / 8, "other": 1.0})
    assert capsys.readouterr().out == "step 4: reward 0.500\nstep 8: reward 1.000\nstep 9: reward 1.125\n"
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 10))


def test_rows_after_the_checkpoint_move_aside(tmp_path):
    writer = metrics(tmp_path)
    for step in range(5):
        writer.log(step, {"x": float(step)})
        writer.show_samples(step, [{"text": f"{step}a"}, {"text": f"{step}b"}])
    whole = (tmp_path / "metrics.jsonl").read_text()
    metrics(tmp_path, 2)
    aside = tmp_path / "metrics.after-step-2.jsonl"
    assert (tmp_path / "metrics.jsonl").read_text() + aside.read_text() == whole
    assert (steps(tmp_path / "metrics.jsonl"), steps(aside)) == ([0, 1, 2], [3, 4])
    assert steps(tmp_path / "samples.after-step-2.jsonl") == [3, 3, 4, 4]
    metrics(tmp_path, 2).log(3, {"x": -3.0})
    metrics(tmp_path, 2)
    assert steps(tmp_path / "metrics.after-step-2.1.jsonl") == [3] and steps(aside) == [3, 4]


def test_nothing_to_move_leaves_no_file(tmp_path):
    metrics(tmp_path).log(1, {})
    metrics(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_start_from_the_beginning_moves_every_row(tmp_path):
    """A run killed before its first checkpoint starts over and evaluates at step 0 again: with the
    first row kept, the resumed run would have two rows of step 0 and the uninterrupted one a single one."""
    writer = metrics(tmp_path)
    writer.log(0, {"eval/accuracy": 0.5})
    writer.log(1, {"x": 1.0})
    metrics(tmp_path).log(0, {"eval/accuracy": 0.5})
    assert steps(tmp_path / "metrics.jsonl") == [0]
    assert steps(tmp_path / "metrics.after-step-0.jsonl") == [0, 1]


def test_half_a_last_line_moves_too(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for cut in ('{"step": 2, "x": 1', '{"step": 2}'):
        file.write_text('{"step": 1}\n' + cut)
        rewind(file, 2)
        assert file.read_text() == '{"step": 1}\n'
    assert (tmp_path / "metrics.after-step-2.1.jsonl").read_text() == '{"step": 2}'


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\u2029\x0c\x1eb", "a\r\nb\rc"])
def test_samples_with_unusual_line_breaks_stay_whole(tmp_path, text):
    """Models write U+2028 and U+0085; JSON lines end at a line feed only, `str.splitlines` breaks there too."""
    writer = metrics(tmp_path)
    for step in (1, 2):
        writer.show_samples(step, [{"text": text}])
    metrics(tmp_path, 1)
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 2 and json.loads(lines[0]) == {"step": 1, "text": text}
    assert json.loads((tmp_path / "samples.after-step-1.jsonl").read_bytes()) == {"step": 2, "text": text}


def test_a_character_cut_in_half_does_not_stop_a_resume(tmp_path):
    """SIGKILL may come between the bytes of one character."""
    file = tmp_path / "samples.jsonl"
    tail = '{"step": 2, "text": "é'.encode()[:-1]
    file.write_bytes(b'{"step": 1}\n' + tail)
    rewind(file, 5)
    assert file.read_bytes() == b'{"step": 1}\n'
    assert (tmp_path / "samples.after-step-5.jsonl").read_bytes() == tail


def test_lone_surrogates_in_samples_are_escaped(tmp_path):
    metrics(tmp_path).show_samples(1, [{"text": "\ud800"}])
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"step": 1, "text": "\ud800"}


def scalars(folder, tag):
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    assert "bad" not in accumulator.Tags()["scalars"]  # it was never finite
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


@pytest.mark.parametrize("resume", [0, 2])
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, resume):
    """Events of steps that are run again are purged by readers; the old file keeps them."""
    options = {"trackers": ("tensorboard",)}
    writer = metrics(tmp_path, **options)
    for step in range(5):
        writer.log(step, {"loss": float(step), "bad": math.nan})
    writer.close()
    assert scalars(tmp_path, "loss") == [(step, float(step)) for step in range(5)]
    writer = metrics(tmp_path, resume, **options)
    first = resume + 1 if resume else 0
    for step in range(first, 4):
        writer.log(step, {"loss": -1.0})
    writer.close()
    assert scalars(tmp_path, "loss") == [(step, float(step) if step < first else -1.0) for step in range(4)]


def test_unknown_trackers_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"run\.trackers.*'papyrus'.*tensorboard"):
        metrics(tmp_path, trackers=("papyrus",))


def test_a_tracker_without_its_package_is_refused_not_left_out(tmp_path):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    absent = [name for name in LOGGER_TYPE_TO_CLASS if not filter_trackers([name], logging_dir=str(tmp_path))]
    if not absent:
        pytest.skip("every tracker's package is installed")
    with pytest.raises(ValueError, match=f"{str(absent[0]).split('.')[-1].lower()}|{absent[0]}.*not installed"):
        metrics(tmp_path, trackers=(str(absent[0]),))


def test_curves_are_drawn_from_the_file(tmp_path):
    writer = metrics(tmp_path)
    writer.log(1, {"reward/mean": 0.5, "update/gradient_norm": math.nan})
    writer.log(2, {"reward/mean": 0.75})
    writer.close()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob(".*"))


def test_closing_without_a_row_draws_nothing(tmp_path):
    """A run that is resumed at its last step has nothing to add, maybe in a folder without rows."""
    metrics(tmp_path, 9).close()
    assert not (tmp_path / "curves.png").exists()
