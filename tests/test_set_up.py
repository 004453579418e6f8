"""The set-up of launch.sh: one installation, complete or not counted, by one launcher at a time."""

import json
import os
import signal
from pathlib import Path

import pytest
from fake_checkout import FAKE_PYTHON, Checkout, make_checkout, script, wait_for


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path)


def test_the_first_run_installs_and_the_second_asks_for_nothing(checkout):
    root = checkout.root
    report = checkout.report("probe", "x y")  # stdout is one JSON line: set-up talks on stderr
    assert report["argv"] == ["-m", "models.probe", "x y"]
    assert report["env"]["PYTHONPATH"] == str(root)
    assert checkout.calls(f"install -c {root}/constraints.txt -r {root}/.venv/requirements.txt") == 1
    # Isolated: a package on the caller's PYTHONPATH must not pass for an installed one.
    assert checkout.calls("-I -m venv") == 1 and checkout.calls("-I -m pip") == checkout.calls("-m pip") == 2
    wanted = (root / ".venv" / "requirements.txt").read_text().splitlines()
    assert "torch>=2.11,<2.14" in wanted and any(line.startswith("pytest-xdist") for line in wanted)
    assert not any(line.startswith("flash-attn") for line in wanted)

    checkout.log.unlink()
    assert checkout.report("draw", FAKE_PIP="exit 1")["argv"] == ["-m", "rollout.draw"]
    assert checkout.calls("pip") == checkout.calls("venv") == 0


def test_a_changed_constraint_installs_again_in_place(checkout):
    checkout.run("probe")
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("six==1.17.0\n")
    checkout.run("probe")
    checkout.run("probe")
    assert checkout.calls(" install -c ") == 2
    assert checkout.calls("-m venv") == 1


def test_a_failed_install_says_what_failed_and_does_not_count(checkout):
    fail = "echo '2026-01-01T00:00:00,000 ERROR: No matching distribution found for nonesuch' >\"$6\"; exit 1"
    stdout, stderr = checkout.run("probe", status=1, FAKE_PIP=fail)
    assert stdout == ""
    assert "  ERROR: No matching distribution found for nonesuch\n" in stderr
    assert "error: pip could not install the packages" in stderr
    assert not checkout.stamp.exists()

    leftover = checkout.root / ".venv" / "half-written"
    leftover.touch()
    checkout.run("probe")
    assert checkout.stamp.exists() and not leftover.exists()


def test_an_installation_killed_half_way_is_made_anew(checkout):
    process = checkout.start("probe", FAKE_PIP="sleep 60")
    wait_for(lambda: checkout.calls(" install -c "), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not checkout.stamp.exists()
    checkout.run("probe")
    assert checkout.stamp.exists()
    assert checkout.calls("-m venv") == 2


def test_two_at_once_install_once(checkout, tmp_path):
    gate = tmp_path / "gate"
    pip = f"for _ in {{1..1200}}; do [ -e '{gate}' ] && exit; sleep 0.05; done; exit 1"  # never outlives the test
    first = checkout.start("probe", FAKE_PIP=pip)
    wait_for(lambda: checkout.calls(" install -c "), first)
    second = checkout.start("draw", FAKE_PIP="exit 1")
    assert "Waiting for another launch.sh" in second.stderr.readline()
    gate.touch()
    for process, module in ((first, "models.probe"), (second, "rollout.draw")):
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert json.loads(stdout)["argv"] == ["-m", module]
    assert checkout.calls(" install -c ") == 1


def test_the_lock_is_let_go_before_the_command_runs(checkout):
    """A training run of days must not keep a changed constraint from being installed elsewhere."""
    assert not [file for file in checkout.report("probe")["files"] if "launch.lock" in file]


def test_a_missing_venv_module_names_the_package_to_install(checkout):
    _, stderr = checkout.run("probe", status=1, FAKE_VERSION="3.12", FAKE_NO_ENSUREPIP="1")
    assert "lacks the module venv or ensurepip" in stderr
    assert "apt-get install python3.12-venv" in stderr
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10", "3.13"])
def test_another_python_is_refused_by_its_version(checkout, version):
    _, stderr = checkout.run("probe", status=1, FAKE_VERSION=version)
    assert stderr.startswith("error: Python 3.11 or 3.12 is needed") and f"python3 is {version}" in stderr


def test_no_python_at_all_is_said(checkout):
    (checkout.bin / "python3").unlink()
    _, stderr = checkout.run("probe", status=1)
    assert "no python3 or python on PATH" in stderr


def test_a_python_that_fits_is_found_behind_one_that_does_not(checkout):
    script(checkout.bin / "python3", "#!/bin/bash\nexit 127\n")  # a version manager's empty shim
    script(checkout.bin / "python3.12", FAKE_PYTHON)
    _, stderr = checkout.run("probe", FAKE_VERSION="3.12")
    assert "with python3.12 (once" in stderr


def test_somebody_elses_venv_is_left_alone(checkout):
    theirs = checkout.root / ".venv" / "bin" / "activate"
    script(theirs, "")
    _, stderr = checkout.run("probe", status=1)
    assert "was not made by launch.sh" in stderr
    assert theirs.exists()
