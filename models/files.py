"""Files that are there whole or not at all, and the exception: devices and pipes, which stay what they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PICTURES = ("png", "svg", "pdf")


def is_special(path: str | Path) -> bool:
    """Whether something is there that is no regular file (/dev/null, a pipe): it is written to, never replaced."""
    path = Path(path)
    return path.exists() and not path.is_file()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed at the end, removed after an error. A link stays a link."""
    path = Path(path).resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: str | Path, option: str) -> Path:
    """`path`, or ValueError naming `option` where no file could be written there."""
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: must name a file in a folder that exists")
    return path


def check_picture(path: str | Path, option: str) -> Path:
    """The same for a picture, whose suffix says its format (none: PNG, which a device gets)."""
    path = check_output(path, option)
    if path.suffix.removeprefix(".") not in ("", *PICTURES):
        raise ValueError(f"{option} {str(path)!r}: the format {path.suffix!r} is not supported; end it in "
                         f".{', .'.join(PICTURES)}")
    return path


def save_picture(figure, path: str | Path) -> None:
    """Write a matplotlib figure to a path that `check_picture` has passed."""
    path = Path(path)
    kind = path.suffix.removeprefix(".") or "png"
    if is_special(path):
        with open(path, "wb") as file:
            figure.savefig(file, format=kind)
        return
    with replacing(path) as partial:
        figure.savefig(partial, format=kind)
