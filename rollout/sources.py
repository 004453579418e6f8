"""The rows of a JSONL file, a parquet file or a hub data set, each with the place it stands in.

What the columns mean is none of this module's business; the place is what an error about a row
names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

Row = tuple[str, dict]  # where it stands ("train.jsonl line 3"), and its columns


def read_rows(spec: str | Path, split: str) -> tuple[str, list[Row]]:
    """The rows of the file, folder or hub name `spec`, and a name for them that no path enters.

    Errors: ValueError naming the file and line, or all that was tried; also for no rows at all.
    """
    file, name = _find(spec, split)
    if file is None:
        rows = _hub_rows(str(spec), split)
    else:
        rows = read_jsonl(file) if file.suffix == ".jsonl" else _parquet_rows(file)
    if not rows:
        raise ValueError(f"{file or spec}: holds no rows")
    return name, rows


def read_jsonl(file: str | Path) -> list[Row]:
    """The objects of a JSONL file, with the line each stands in; blank lines are skipped.

    Strict: UTF-8, one object a line, no NaN or Infinity, no key twice. Errors: ValueError naming
    file and line.
    """
    rows = []
    # Split at newline bytes only: str.splitlines would also cut at U+2028 inside a text.
    for number, line in enumerate(Path(file).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:  # bad UTF-8, bad or too deep JSON, or one of the two hooks
            raise ValueError(f"{where}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
        rows.append((where, row))
    return rows


def _find(spec: str | Path, split: str) -> tuple[Path | None, str]:
    """The file that `spec` means and the set's default name; no file for a hub name."""
    path, text = Path(spec), str(spec)
    if path.is_dir():
        choices = [path / f"{split}.jsonl", path / f"{split}.parquet"]
        found = [choice for choice in choices if choice.is_file()]
        if not found:
            raise ValueError(f"data {text!r}: the folder holds neither {choices[0].name} nor {choices[1].name}; "
                             f"name another split than {split!r}, or a file")
        return found[0], split
    if path.is_file():
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"data {text!r}: suffix {path.suffix!r}; a file must be .jsonl or .parquet")
        return path, path.stem
    if isinstance(spec, Path) or path.suffix in (".jsonl", ".parquet") or text.startswith(("/", ".", "~")):
        raise ValueError(f"data {text!r}: no such file or folder (looked at {path.absolute()})")
    return None, f"{text}/{split}"


def _hub_rows(spec: str, split: str) -> list[Row]:
    name, _, configuration = spec.partition(":")
    configuration = configuration or None
    datasets = _datasets(f"data {spec!r} is no file or folder here, and a hub name")
    try:
        found = datasets.load_dataset(name, configuration, split=split)
        return [(f"{spec} split {split} row {number}", dict(row)) for number, row in enumerate(found)]
    except Exception as error:  # network, cache, name, configuration or split: a long list of types
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(
            f"data {spec!r}: tried the path {Path(spec).absolute()} (no such file or folder) and the hub data set "
            f"{name!r}, configuration {configuration!r}, split {split!r} ({type(error).__name__}: {reason}); give "
            "the path of a .jsonl or .parquet file, or download the set where there is a network") from error


def _parquet_rows(file: Path) -> list[Row]:
    datasets = _datasets(f"{file} is a parquet file and")
    try:
        # A cache of its own, dropped at once: the shared one may be read-only or hold an older file.
        with tempfile.TemporaryDirectory() as cache:
            found = datasets.load_dataset("parquet", data_files={"rows": str(file)}, split="rows", cache_dir=cache,
                                          keep_in_memory=True)
            return [(f"{file} row {number}", dict(row)) for number, row in enumerate(found)]
    except Exception as error:
        raise ValueError(f"{file}: not readable as parquet: {type(error).__name__}: {error}") from error


def _datasets(why: str):
    """The `datasets` package, imported only where a spec needs it (it takes seconds)."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{why} needs the package datasets, which is not installed; install it or give a .jsonl "
                         "file") from error
    return datasets


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: Iterable[tuple[str, object]]) -> dict:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} occurs twice")
        found[key] = value
    return found
