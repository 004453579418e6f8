"""`python -m train.verify replay LOG_OR_DIR ... --model DIR`: replay logs and compare the bits.

Each log is read, its structure checked, executed again under the model whose weights it names,
and compared with what it recorded, bit for bit; every token and gate exit is drawn again; and
the dense forward is read out at the same depths: under numerics `invariant` it must have the
same bits. `--as passes` leaves that out, `--as packed` does nothing else. The last line of stdout is one JSON object:

    tokens, mismatched     replayed tokens, and those whose log-prob has other bits
    max_abs_diff           largest |replayed - recorded| (null: not finite)
    dense_max_abs_diff     largest |dense - replayed|: rounding, not an error
    bit_equal              every log was replayed and no token differs
    redrawn_differ         tokens that the logged seed and uids, or the gate, do not give again
    packed_tokens          tokens compared with a packed forward too (numerics invariant)
    logs, refused          logs found, and those that could not be replayed

Exit status: 0 bit-equal and redrawn alike, 1 something differs or was refused, 2 nothing could
be replayed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.checkpoint import load_model
from models.cli import run_cli
from models.invariance import adopt_rule
from models.looped import LoopedLM
from models.numerics import configure
from rollout.collect import LOG_FILE
from rollout.log import ScheduleLog
from rollout.structure import read_checked
from train.dense import dense_values
from train.replay import check_contract, check_process, locate, mismatches, recorded, replay, replay_packed

HOW = ("passes", "packed", "both")


@dataclass(frozen=True)
class Verdict:
    """What became of one log.

    Attributes:
        path: the file. refused: why it could not be replayed; the rest is 0 then.
        tokens, mismatched: response tokens, and those whose replayed bits differ.
        first: (sequence, position in prompt + response) of the first that differs.
        max_abs_diff, dense_max_abs_diff: largest |replayed - recorded| and |dense - replayed|.
        redrawn_differ: tokens that drawing again does not give.
        packed: tokens that one packed forward was compared at.
    """

    path: Path
    refused: str | None = None
    tokens: int = 0
    mismatched: int = 0
    first: tuple[int, int] | None = None
    max_abs_diff: float = 0.0
    dense_max_abs_diff: float = 0.0
    redrawn_differ: int = 0
    packed: int = 0

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.path}: refused: {self.refused}"
        text = f"{self.path}: {self.tokens} tokens, "
        if self.mismatched:
            text += (f"{self.mismatched} differ, first at sequence {self.first[0]}, position "
                     f"{self.first[1]}, by at most {self.max_abs_diff:.3g}")
        else:
            text += "bit-equal" + (", packed too" if self.packed else "")
        if self.redrawn_differ:
            text += f"; {self.redrawn_differ} are not what the logged seed, uids and gate give"
        return text + f"; dense within {self.dense_max_abs_diff:.3g}"


@dataclass(frozen=True)
class Report:
    """Verdicts of all logs, in the order of their paths."""

    verdicts: tuple[Verdict, ...]

    def summary(self) -> dict:
        """The JSON object of the last line."""
        done, tokens = self.verdicts, sum(v.tokens for v in self.verdicts)
        mismatched = sum(v.mismatched for v in done)
        refused = sum(v.refused is not None for v in done)
        return {"tokens": tokens, "mismatched": mismatched,
                "max_abs_diff": _finite(max((v.max_abs_diff for v in done), default=0.0)),
                "dense_max_abs_diff": _finite(max((v.dense_max_abs_diff for v in done), default=0.0)),
                "bit_equal": tokens > 0 and not mismatched and not refused,
                "redrawn_differ": sum(v.redrawn_differ for v in done), "packed_tokens": sum(v.packed for v in done),
                "logs": len(done), "refused": refused}

    @property
    def status(self) -> int:
        """Exit status of the command."""
        found = self.summary()
        if found["tokens"] == 0:
            return 2
        return 0 if found["bit_equal"] and not found["redrawn_differ"] else 1


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class ModelFinder:
    """Finds the folder whose weights have a given digest; holds one loaded model at a time."""

    def __init__(self, folders: Sequence[Path], device: torch.device):
        self.folders, self.device = folders, device
        self.digests: dict[tuple[Path, str], str | None] = {}  # by (folder, dtype); None: unreadable
        self.loaded: tuple[tuple, LoopedLM] | None = None

    def find(self, log: ScheduleLog) -> LoopedLM:
        """The model of `log`, in its dtype and profile. RuntimeError when there is none."""
        wanted, dtype = log.header["weights"], log.header["dtype"]
        reasons = []
        for folder in self.folders:
            if self.digests.get((folder, dtype), wanted) != wanted:
                continue
            try:
                model = self._load(folder, log)
            except ValueError as error:
                if len(self.folders) == 1:
                    raise
                self.digests[folder, dtype] = None
                reasons.append(str(error))
                continue
            if (folder, dtype) not in self.digests:
                self.digests[folder, dtype] = model.digest()
            if self.digests[folder, dtype] == wanted:
                return model
        if len(self.folders) == 1:  # say which field differs, the weights being the last one
            check_contract(self._load(self.folders[0], log), log)
        raise RuntimeError(f"none of {len(self.folders)} models has the weights of the log (digest "
                           f"{wanted[:16]}...)" + "".join(f"; {reason}" for reason in reasons))

    def _load(self, folder: Path, log: ScheduleLog) -> LoopedLM:
        key = (folder, *(log.header[name] for name in ("dtype", "profile", "linear")))
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = None  # frees the old one before the new one is read
            self.loaded = key, load_model(folder, dtype=key[1], profile=key[2], linear=key[3], device=self.device)
        model = self.loaded[1]
        adopt_rule(model, log.header["rule"])
        return model


def find_logs(paths: Sequence[str | Path]) -> list[Path]:
    """The log files that `paths` name: files as they are, folders searched for schedule logs."""
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"log {path} does not exist")
        inside = sorted(path.rglob(LOG_FILE)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"folder {path} holds no {LOG_FILE}, at any depth")
        found += [file for file in inside if file not in found]
    return found


def find_models(paths: Sequence[str | Path]) -> list[Path]:
    """The model folders that `paths` name: each itself, or all folders below with a config.json."""
    found = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"model = {str(path)!r} is not a folder")
        itself = (path / "config.json").is_file()
        inside = [path] if itself else sorted(file.parent for file in path.rglob("config.json"))
        if not inside:
            raise ValueError(f"model = {str(path)!r} holds no config.json, at any depth")
        found += [folder for folder in inside if folder not in found]
    return found


def verify_log(path: Path, models: ModelFinder, how: str = "both") -> Verdict:
    """Read, check, replay and compare one log. A ValueError or RuntimeError becomes a refusal.

    how: `passes`, `packed` (logs of numerics `invariant` only) or `both` (packed where it has the bits).
    """
    try:
        log = read_checked(path)
        if not log.completions:
            raise RuntimeError(f"log {path}: it holds no sequences")
        check_process(models.device, log.header["fingerprint"])
        model = models.find(log)
        # The finder has compared the weights; hashing them again for every log would be waste.
        passes = replay(model, log, same_weights=False, redraw=True) if how != "packed" else None
        exact = model.rule is not None
        packed = replay_packed(model, log, same_weights=False) if how == "packed" or (
            how == "both" and exact) else None
    except (ValueError, RuntimeError) as error:
        return Verdict(path, refused=" ".join(str(error).removeprefix(f"log {path}: ").split()))
    wanted = recorded(log)
    wrong = torch.zeros(log.token_count, dtype=torch.bool)
    apart = torch.zeros(log.token_count)
    for found in (passes, packed):
        if found is not None:
            wrong[mismatches(found, wanted)] = True
            apart = torch.maximum(apart, torch.nan_to_num((found.values - wanted.values).abs(), nan=math.inf))
    places = torch.nonzero(wrong)[:, 0]
    dense = packed.values if packed is not None else dense_values(model, log.completions, log.header["temperature"])
    return Verdict(
        path, tokens=log.token_count, mismatched=len(places),
        first=locate(log, int(places[0])) if len(places) else None,
        max_abs_diff=float(apart[wrong].max()) if len(places) else 0.0,
        dense_max_abs_diff=float(torch.nan_to_num((dense - wanted.values).abs(), nan=math.inf).max()),
        redrawn_differ=int((~passes.redrawn).sum()) if passes is not None else 0,
        packed=log.token_count if packed is not None else 0)


def verify_logs(logs: Sequence[str | Path], models: Sequence[str | Path], *, how: str = "both",
                device: torch.device | str = "cpu", say: Callable[[str], None] = print) -> Report:
    """Replay every log under the model that it names.

    logs: files, or folders searched for schedule logs. models: model folders, or folders that
    hold several; the one whose digest a log names is used. how: see `verify_log`. say: gets one line a log. Errors:
    ValueError when a path names nothing.
    """
    files, finder = find_logs(logs), ModelFinder(find_models(models), torch.device(device))
    verdicts = []
    for file in files:
        verdicts.append(verify_log(file, finder, how))
        say(str(verdicts[-1]))
    return Report(tuple(verdicts))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m train.verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    command = parser.add_subparsers(required=True, metavar="replay").add_parser(
        "replay", help="replay schedule logs and compare the bits")
    command.add_argument("logs", nargs="+", metavar="LOG_OR_DIR", help="schedule logs, or folders of them")
    command.add_argument("--model", nargs="+", required=True, metavar="DIR",
                         help="model folder, or a folder that holds several (a run with its checkpoints)")
    command.add_argument("--as", dest="how", choices=HOW, default="both",
                         help="executed pass by pass, as one packed forward, or both (default)")
    command.add_argument("--device", default="cpu", help="cpu or cuda; must be that of the log")
    command.add_argument("--threads", type=int, default=1, help="CPU threads; must be those of the log")
    options = parser.parse_args(argv)
    device = configure(threads=options.threads, device=options.device)
    report = verify_logs(options.logs, options.model, how=options.how, device=device,
                         say=lambda line: print(line, flush=True))
    print(json.dumps(report.summary()), flush=True)
    return report.status


if __name__ == "__main__":
    run_cli(main)
