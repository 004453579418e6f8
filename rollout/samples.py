"""Samples as JSON lines: what they hold and how they are written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.engine import Completion
from engine.stopping import shown_text
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


def write_rows(rows: Sequence[dict], path: str | Path) -> None:
    """Write JSON lines to a temporary name, then rename; the folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    # A lone surrogate, which UTF-8 cannot carry, becomes its JSON escape.
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def print_rows(rows: Sequence[dict]) -> None:
    """Print JSON lines, escaped where the encoding of stdout cannot carry them."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False)
        try:
            line.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            line = json.dumps(row)
        print(line)
