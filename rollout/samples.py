"""Samples as JSON lines: what they hold and how they are written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from engine.engine import Completion
from engine.stopping import shown_text
from models.files import is_special, replacing
from models.tokenizer import Tokenizer
from rollout.prompts import Prompt


def sample_rows(prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: Tokenizer | None,
                stop_strings: Sequence[str]) -> list[dict]:
    """One JSON-ready object a completion; those of a prompt follow each other.

    text is cut before the first stop string, token_ids are not; it is None without a tokenizer.
    logprobs are the exact values of the float32 bits.
    """
    rows = []
    for completion in completions:
        request = completion.request
        prompt = prompts[request.group]
        text = None if tokenizer is None else shown_text(tokenizer.decode(completion.token_ids), stop_strings)
        rows.append({
            "id": prompt.id, "sample": request.sample, "prompt": prompt.shown,
            "prompt_ids": list(prompt.token_ids), "text": text, "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs), "exit_depths": list(completion.exit_depths),
            "finish_reason": completion.finish_reason, "stop_id": completion.stop_id})
    return rows


def check_outputs(out: str | None, log_dir: str | None) -> None:
    """ValueError where --out or --log-dir could not be written, before the work is done."""
    if out is not None and (not Path(out).absolute().parent.is_dir() or Path(out).is_dir()):
        raise ValueError(f"--out {out}: its folder does not exist, or it is a folder itself")
    if log_dir is not None and Path(log_dir).exists() and not Path(log_dir).is_dir():
        raise ValueError(f"--log-dir {log_dir} is not a folder")


def write_rows(rows: Sequence[dict], path: str | Path) -> None:
    """Write JSON lines to a temporary name, then rename; the folder is made where it is missing.

    What is there already and no regular file (/dev/null, a pipe) is written to and never replaced.
    """
    path = Path(path)
    if is_special(path):
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            _write_lines(rows, file)
        return
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        _write_lines(rows, file)
        file.flush()
        os.fsync(file.fileno())


def _write_lines(rows: Sequence[dict], file: TextIO) -> None:
    # A lone surrogate, which UTF-8 cannot carry, becomes its JSON escape: see the errors= above.
    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def print_rows(rows: Sequence[dict]) -> None:
    """Print JSON lines, escaped where the encoding of stdout cannot carry them."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False)
        try:
            line.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            line = json.dumps(row)
        print(line)
