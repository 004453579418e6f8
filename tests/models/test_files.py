"""Whole files: renamed into place, removed after an error, never put in the place of a device."""

import os

import pytest

from models.files import check_picture, is_special, replacing


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    file = tmp_path / "f"
    with replacing(file) as partial:
        partial.write_text("one")
        assert not file.exists()
    with pytest.raises(OSError, match="full"), replacing(file) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert file.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/real")
    with replacing(tmp_path / "link") as partial:
        partial.write_text("one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "deep/real").read_text() == "one"


def test_devices_and_pipes_are_special_and_files_and_absent_ones_are_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/null")
    assert [is_special(p) for p in ("/dev/null", tmp_path / "pipe", tmp_path / "link")] == [True] * 3
    assert [is_special(p) for p in (tmp_path / "file", tmp_path / "none")] == [False] * 2


def test_a_picture_has_a_format_that_can_be_written(tmp_path):
    for name in ("a.png", "a.svg", "a.pdf", "a", "/dev/null"):
        check_picture(tmp_path / name, "--out")
    for name, message in (("a.gif", "'.gif' is not supported"), ("none/a.png", "folder that exists"), (".", "folder")):
        with pytest.raises(ValueError, match=message):
            check_picture(tmp_path / name, "--out")
