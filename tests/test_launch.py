"""The commands of launch.sh: what runs, where, with which arguments, environment and signals."""

import signal
import sys
from pathlib import Path

import pytest
from fake_checkout import FAKE_PYTHON, Checkout, make_checkout, script


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path)


@pytest.fixture
def brought(tmp_path: Path) -> str:
    """A stand-in for PYTHON=..., outside PATH."""
    return str(script(tmp_path / "brought" / "python", FAKE_PYTHON))


MODULES = {
    "demo": "train.demo",
    "generate": "rollout.generate",
    "evaluate": "train.evaluate",
    "bench": "rollout.bench",
    "bench-step": "train.bench",
    "verify": "train.verify",
    "probe": "models.probe",
    "draw": "rollout.draw",
    "gpu-check": "train.gpu_check",
    "pretrain": "train.pretrain",
}


@pytest.mark.parametrize("command", MODULES)
def test_a_command_runs_its_module_with_the_arguments_untouched(checkout, brought, command):
    arguments = ["two words", "*", "", "--out=a b", "$HOME", "--help"]
    report = checkout.report(command, *arguments, PYTHON=brought)
    assert report["argv"] == ["-m", MODULES[command], *arguments]
    assert checkout.calls("pip") == checkout.calls("venv") == 0
    assert not (checkout.root / ".venv").exists()


def test_only_the_search_path_is_set_and_the_folder_stays_the_callers(checkout, brought):
    report = checkout.report("probe", PYTHON=brought)
    assert report["cwd"] == str(checkout.caller)
    assert report["env"]["PYTHONPATH"] == str(checkout.root)
    assert report["env"]["PYTHONSAFEPATH"] == "1"
    assert report["env"]["OMP_NUM_THREADS"] == "1"
    report = checkout.report("probe", PYTHON=brought, PYTHONPATH="/theirs", OMP_NUM_THREADS="3")
    assert report["env"]["PYTHONPATH"] == f"{checkout.root}:/theirs"
    assert report["env"]["OMP_NUM_THREADS"] == "3"


def test_called_by_symlink_or_relative_path_it_finds_its_checkout(checkout, brought):
    (checkout.caller / "link").symlink_to("../check out/launch.sh")
    for launcher in ("./link", "../check out/launch.sh"):
        report = checkout.report("probe", PYTHON=brought, launcher=launcher)
        assert report["env"]["PYTHONPATH"] == str(checkout.root)


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--version"]])
def test_an_unknown_command_prints_usage_and_sets_nothing_up(checkout, arguments):
    stdout, stderr = checkout.run(*arguments, status=2)
    assert stdout == ""
    assert "usage: ./launch.sh COMMAND" in stderr
    assert all(f"'{argument}'" in stderr for argument in arguments)
    assert not checkout.log.exists()


@pytest.mark.parametrize("word", ["help", "-h", "--help"])
def test_help_goes_to_stdout_and_names_every_command(checkout, word):
    stdout, _ = checkout.run(word)
    assert all(f"\n  {command} " in stdout for command in [*MODULES, "test", "train"])


def test_tests_of_the_checkout_run_from_any_folder(checkout, brought):
    root = str(checkout.root)
    fixed = ["-m", "pytest", "-c", f"{root}/pyproject.toml", "--rootdir", root, "-m"]
    workers = ["-n", "2", "--dist", "worksteal"]
    cases = [
        ([], ["not thorough", *workers, f"{root}/tests"]),
        (["-k", "a b", "--thorough", "-x"], ["", *workers, f"{root}/tests", "-k", "a b", "-x"]),
        (["../check out/tests/models::test_x"], ["not thorough", *workers, "../check out/tests/models::test_x"]),
        (["-k", "models"], ["not thorough", *workers, f"{root}/tests", "-k", "models"]),
    ]
    for arguments, expected in cases:
        assert checkout.report("test", *arguments, PYTHON=brought)["argv"] == [*fixed, *expected]
    alone = checkout.report("test", PYTHON=brought, FAKE_NO_XDIST="1")
    assert alone["argv"] == [*fixed, "not thorough", f"{root}/tests"]


def test_one_training_process_needs_no_torchrun(checkout, brought):
    report = checkout.report("train", "--config", "a b.toml", PYTHON=brought)
    assert report["argv"] == ["-m", "train.run", "--config", "a b.toml"]
    # With LOCAL_RANK=0 the trackers opened a gloo group (NCCL with a GPU) and its port for one process.
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(report["env"])


@pytest.mark.parametrize("asked", [{"NPROC_PER_NODE": "2"}, {"NNODES": "2"}, {"NPROC_PER_NODE": "gpu"}])
def test_several_training_processes_are_refused_before_anything_starts(checkout, brought, asked):
    """Two processes each trained the whole run, unaware of each other, in one run folder; two nodes waited
    for each other without a word."""
    stdout, stderr = checkout.run("train", "run.steps=3", status=2, PYTHON=brought, **asked)
    name, value = next(iter(asked.items()))
    assert stdout == "" and len(stderr.splitlines()) == 1
    assert f"{name}={value}" in stderr and "several processes is not supported yet" in stderr
    assert not checkout.log.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_the_trainer_and_its_status_comes_back(checkout, number):
    """Under torchrun's agent, SIGTERM ended in status 1 although the trainer had saved and left with 0."""
    script(
        checkout.root / "train" / "run.py",
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "while True: signal.pause()\n",
    )
    process = checkout.start("train", PYTHON=sys.executable)
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == 0


def test_packages_in_the_callers_folder_are_not_picked_up(checkout):
    script(checkout.root / "models" / "__init__.py", "WHERE = 'checkout'\n")
    script(checkout.root / "rollout" / "generate.py", "import models; print(models.WHERE)\n")
    for package in ("models", "rollout", "train", "engine"):
        script(checkout.caller / package / "__init__.py", "raise SystemExit('the wrong package')\n")
    assert checkout.run("generate", PYTHON=sys.executable)[0] == "checkout\n"


def test_a_brought_interpreter_that_is_not_there_is_named(checkout):
    _, stderr = checkout.run("probe", status=1, PYTHON="/no/such/python")
    assert "PYTHON=/no/such/python is not an interpreter" in stderr
