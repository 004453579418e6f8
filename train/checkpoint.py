"""Checkpoints on disk: written whole or not at all, and read only if every byte is as written.

Knows names, tensors and files; not what they mean. A checkpoint is a folder `step-000010`:
tensors.safetensors, state.json, model/ (an export that other tools read) and manifest.json with
the size and sha256 of every other file. One process writes.

Other names in the same folder: `.partial` (being written), `.deleted` (being deleted), `.replaced`
(its successor of the same step is being put in place), `.after-N` (set aside by `rewind`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
TENSORS, STATE, MODEL, MANIFEST = "tensors.safetensors", "state.json", "model", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read; the exported model lies in path / "model"."""

    path: Path
    step: int  # steps done when it was written
    tensors: dict[str, Tensor]  # on the CPU, each in memory of its own
    state: dict[str, Any]  # as given to `save`, through JSON


def save(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    export: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep`.

    tensors: any dtype and device, no two sharing memory. state: JSON values; floats keep their bits,
    NaN and infinity are refused. export(path) writes the model's files into a folder that it makes.
    An older checkpoint of the same step is replaced. Nothing is deleted before the new one is
    complete and on disk; a process killed anywhere in between leaves a sound one.

    ValueError: NaN or infinity in state. RuntimeError: the files cannot be written (disk full, ...);
    older checkpoints are as before. What `export` raises passes through.
    """
    assert keep >= 1, f"keep is {keep}: at least the new checkpoint stays"
    text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False)
    folder = Path(folder)
    final = folder / f"step-{step:06d}"
    partial = folder / f"{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in _entries(folder, "partial", "deleted"):
            shutil.rmtree(leftover)
        partial.mkdir()
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, partial / TENSORS)
        (partial / STATE).write_text(text, encoding="utf-8")
        export(partial / MODEL)
        _write_manifest(partial, step)
        _put_in_place(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise RuntimeError(f"checkpoint {final} cannot be written: {error}; older ones are untouched") from error
        raise
    _prune(folder, step, keep)
    return final


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint after checking every file against its manifest.

    ValueError: no such folder. RuntimeError: a missing, extra or altered file, by name.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"run.resume = {str(path)!r}: no such checkpoint folder")
    manifest = verify(path)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    # Clones: tensors of a mapped file may lie off the 16-byte boundary that kernels' bits depend on.
    tensors = {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}
    return Checkpoint(path, manifest["step"], tensors, state)


def latest(folder: str | Path, warn: Callable[[str], None]) -> Path | None:
    """The newest sound checkpoint, or None; `warn` hears of every unfinished or damaged one passed over."""
    for path in _entries(Path(folder), "partial", "deleted"):
        warn(f"{path} is unfinished and ignored")
    # `.replaced` counts: it is all there is of a step between the two renames of `_put_in_place`.
    for path in sorted(_entries(Path(folder), "", "replaced"), key=lambda path: (_step(path), path.suffix == ""))[::-1]:
        try:
            verify(path)
        except RuntimeError as error:
            warn(f"{error}; it is skipped")
        else:
            return path
    return None


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files all agree with it; RuntimeError naming the first that does not."""
    manifest = _read_manifest(path)
    found = _files(path)
    for name in sorted(set(found) - set(manifest["files"])):
        raise RuntimeError(f"checkpoint {path}: {name} is not in its manifest")
    for name, entry in manifest["files"].items():
        if name not in found:
            raise RuntimeError(f"checkpoint {path}: {name} is missing")
        try:
            same = entry == _entry(found[name])
        except OSError as error:
            raise RuntimeError(f"checkpoint {path}: {name} cannot be read: {error.strerror}") from error
        if not same:
            raise RuntimeError(f"checkpoint {path}: {name} is damaged")
    return manifest


def rewind(folder: str | Path, step: int) -> list[Path]:
    """Set checkpoints of later steps aside, so that a run resumed at `step` cannot later resume from them.

    They are renamed `step-000030.after-10` (`.after-10.1` if taken, ...), never deleted. Returns the new paths.
    """
    moved = []
    for path in _entries(Path(folder), "", "replaced"):
        if _step(path) > step:
            base = path.with_suffix("").name
            number = 0
            while (aside := path.parent / f"{base}.after-{step}{f'.{number}' if number else ''}").exists():
                number += 1
            path.rename(aside)
            moved.append(aside)
    return moved


def _entries(folder: Path, *suffixes: str) -> list[Path]:
    """Checkpoint folders with one of the suffixes ("": finished ones), by step."""
    if not folder.is_dir():
        return []
    pattern = re.compile(r"step-\d{6,}(?:\.(\w+))?")
    matches = [(path, pattern.fullmatch(path.name)) for path in folder.iterdir()]
    return sorted((path for path, match in matches if match and (match[1] or "") in suffixes), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _files(path: Path) -> dict[str, Path]:
    """Relative name -> path of every file of a checkpoint except the manifest."""
    found = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if not file.is_dir()}
    found.pop(MANIFEST, None)
    return found


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise RuntimeError(f"checkpoint {path}: {MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version, step, files = manifest["format"], manifest["step"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"checkpoint {path}: {MANIFEST} is damaged") from error
    if version != FORMAT:
        raise RuntimeError(f"checkpoint {path}: format {version!r} is not known, this program reads {FORMAT}")
    if set(manifest) != {"format", "step", "files"} or not isinstance(files, dict) or type(step) is not int:
        raise RuntimeError(f"checkpoint {path}: {MANIFEST} is damaged")
    if not {TENSORS, STATE} <= set(files):
        raise RuntimeError(f"checkpoint {path}: {MANIFEST} names no {TENSORS} or no {STATE}")
    if path.name.startswith("step-") and step != _step(path):
        raise RuntimeError(f"checkpoint {path}: {MANIFEST} is of step {step}")
    return manifest


def _write_manifest(partial: Path, step: int) -> None:
    """Bring every file to the disk, then the list of them: a manifest on disk speaks for what is on disk."""
    entries = {}
    for name, file in _files(partial).items():
        _sync(file)
        entries[name] = _entry(file)
    manifest = {"format": FORMAT, "step": step, "files": entries}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(partial / MANIFEST)
    for directory in [path for path in partial.rglob("*") if path.is_dir()]:
        _sync(directory)
    _sync(partial)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename; a checkpoint of the same name makes way, and `_prune` removes it once its successor stands."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete older checkpoints than the newest `keep` complete ones up to `step`; damaged ones do not count."""
    kept = 0
    for path in reversed(_entries(folder, "")):
        if _step(path) > step:
            continue
        if kept < keep:
            kept += _looks_complete(path)
            continue
        # Renamed first: a kill in the middle must not leave a folder that looks like a checkpoint.
        doomed = path.rename(path.with_name(f"{path.name}.deleted"))
        shutil.rmtree(doomed)
    for path in _entries(folder, "replaced"):
        shutil.rmtree(path)


def _looks_complete(path: Path) -> bool:
    """Whether the files have the sizes of the manifest; contents are only read when loading."""
    try:
        files = _read_manifest(path)["files"]
    except RuntimeError:
        return False
    return {name: entry.get("bytes") for name, entry in files.items()} == {
        name: file.stat().st_size for name, file in _files(path).items()
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
