"""Settings that decide bits, and how commands report failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.numerics import configure, dtype_name, dtype_of, fingerprint, wide

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_dtype_names_go_there_and_back(name):
    assert dtype_name(dtype_of(name)) == name


@pytest.mark.parametrize("name, message", [
    ("float16", "float16 is not supported.*use bfloat16 or float32"), ("fp16", "float16 is not supported"),
    ("bf16", "'bf16' is unknown; use one of float32, bfloat16, float64"), ("", "unknown")])
def test_other_dtypes_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        dtype_of(name)


def test_reductions_are_float32_but_for_references():
    assert wide(torch.bfloat16) == wide(torch.float32) == torch.float32
    assert wide(torch.float64) == torch.float64


def test_configure_sets_the_thread_count():
    configure(threads=2)
    try:
        assert torch.get_num_threads() == 2
        assert fingerprint(torch.device("cpu"))["threads"] == 2
    finally:
        assert configure() == torch.device("cpu")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("options, message", [
    ({"threads": 0}, "threads = 0 must be at least 1"),
    ({"threads": 100_000}, "threads = 100000 must be .* at most 1024"),  # was a segmentation fault
    ({"threads": 10**11}, "threads = 100000000000"), ({"device": "tpu"}, "device = 'tpu' is not supported")])
def test_configure_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        configure(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be absent")
def test_an_absent_device_is_refused_not_replaced():
    with pytest.raises(ValueError, match="sees no CUDA device; use --device cpu"):
        configure(device="cuda")


def test_the_fingerprint_names_libraries_and_settings_that_change_bits(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    found = fingerprint(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and found["device"] == "cpu"
    assert "MKL_CBWR=AVX2" in found["environment"] and "ATEN" not in found["environment"]
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert all(isinstance(value, str | int) for value in found.values())
    if torch.backends.mkl.is_available():
        assert found["mkl"][:4].isdigit()
    if torch.backends.mkldnn.is_available():
        assert found["onednn"].count(".") == 2


def command(body, **options):
    code = f"import sys\nfrom models.cli import run_cli\ndef main():\n    {body}\nrun_cli(main)"
    return subprocess.run([sys.executable, "-c", code], text=True, cwd=ROOT, capture_output=True, **options)


@pytest.mark.parametrize("body, status, error", [
    ("return 0", 0, ""), ("return 3", 3, ""),
    ("raise ValueError('field = 1\\n  is wrong')", 2, "error: field = 1 is wrong\n"),
    ("raise RuntimeError('digest differs')", 2, "error: digest differs\n"),
    ("open('/nowhere/at/all')", 2, "error: [Errno 2] No such file or directory: '/nowhere/at/all'\n"),
    ("raise OSError(28, 'No space left on device', '/run/log')", 2,
     "error: [Errno 28] No space left on device: '/run/log'\n"),
    ("open('a' * 300)", 2, f"error: [Errno 36] File name too long: '{'a' * 300}'\n"),
    ("bytearray(2**62)", 2, "error: out of memory\n"),
    ("raise KeyboardInterrupt", 130, "interrupted\n")])
def test_a_callers_fault_is_one_line(body, status, error):
    """Full disks, names too long and sizes beyond the memory once ended in tracebacks."""
    done = command(body)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_fault(closed, tmp_path):
    """`command >&-`: Python then has no sys.stdout at all, and asking its encoding or flushing it was an
    AttributeError; without stderr the progress bar failed, and what was meant for it went to stdout."""
    code = ("import sys\nfrom models.cli import run_cli\nfrom tqdm import tqdm\n"
            "def main():\n    print('shown', sys.stdout.encoding and '')\n"
            "    for _ in tqdm([1], file=sys.stderr): print('note', file=sys.stderr)\n"
            "    open(sys.argv[1], 'w').write('done')\n    return 0\nrun_cli(main)")
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(tmp_path / "file")],
                          cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "done"
    assert done.stdout == ("" if ">&-" in closed.split() else "shown \n")
    assert "Traceback" not in done.stderr


def test_a_fault_of_our_own_keeps_its_traceback():
    done = command("assert 1 == 2")
    assert done.returncode == 1 and "Traceback" in done.stderr and "AssertionError" in done.stderr


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_is_no_fault(lines):
    """`command | head`: found while printing, or only at the last flush."""
    code = ("import sys, time\nfrom models.cli import run_cli\ndef main():\n    sys.stdin.read()\n"
            f"    for _ in range({lines}): print('x' * 50)\n    return 0\nrun_cli(main)")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, cwd=ROOT, env=buffered)
    run.stdout.close()
    run.stdin.close()
    assert run.wait() == 141
    assert run.stderr.read() == b""
    run.stderr.close()
