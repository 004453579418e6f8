"""A checkout for the tests of launch.sh, and a Python that only plays its part.

The checkout holds launch.sh, pyproject.toml and constraints.txt and nothing else, in a folder
with a space in its name. FAKE_PYTHON records what it is asked and installs nothing, so no test
touches the network or the real .venv.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
TOOLS = "awk bash cat chmod cp cut dirname find flock ls mkdir mv readlink rm sed sha256sum sleep touch".split()

# Answers what set-up asks; FAKE_PIP is what "pip install" does; anything else is the command
# itself, reported as one JSON line.
FAKE_PYTHON = r"""#!/bin/bash
printf '%s\n' "$*" >>"$FAKE_LOG"
case "$*" in
    *version_info*) echo "${FAKE_VERSION:-3.11}" ;;
    *ensurepip*) exit "${FAKE_NO_ENSUREPIP:-0}" ;;
    *"import xdist"*) exit "${FAKE_NO_XDIST:-0}" ;;
    *" -m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    *" install -c "*) echo "pip talks"; eval "${FAKE_PIP:-}" ;;
    *" -m pip "*) ;;
    "-I -"*) exec "$REAL_PYTHON" "$@" ;;
    *) exec "$REAL_PYTHON" -c 'import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ),
    "files": [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]}))' "$@" ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Checkout:
    root: Path  # the fake checkout
    bin: Path  # the only folder on PATH: the tools that launch.sh may use, and python3
    log: Path  # one line for each call of FAKE_PYTHON: its arguments
    caller: Path  # the folder that launch.sh is called from

    def start(self, *arguments: str, launcher: str | Path | None = None, **environment: str) -> subprocess.Popen:
        env = {"PATH": str(self.bin), "FAKE_LOG": str(self.log), "REAL_PYTHON": sys.executable, **environment}
        return subprocess.Popen(
            [str(launcher or self.root / "launch.sh"), *arguments],
            cwd=self.caller, env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str, status: int = 0, **options) -> tuple[str, str]:
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == status, stderr
        return stdout, stderr

    def report(self, *arguments: str, **options) -> dict:
        return json.loads(self.run(*arguments, **options)[0])

    def calls(self, part: str) -> int:
        return sum(part in line for line in self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / "installed"


def make_checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "check out", tmp_path / "bin", tmp_path / "calls", tmp_path / "caller")
    for folder in (made.root, made.bin, made.caller):
        folder.mkdir()
    for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(SOURCE / name, made.root / name)
    for tool in TOOLS:
        (made.bin / tool).symlink_to(shutil.which(tool))
    script(made.bin / "python3", FAKE_PYTHON)
    return made


def wait_for(condition, process: subprocess.Popen) -> None:
    for _ in range(3000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("waited in vain")
