"""Prompts of the generation command: from the command line or a file, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Request
from models.tokenizer import Tokenizer
from rollout.data import load_data, uid

STEP = 0  # of the uid: these samples belong to no optimizer step


@dataclass(frozen=True)
class Prompt:
    """One prompt to sample from.

    Attributes:
        source: name of the set it comes from; with id it keys the random numbers.
        id: the file's id, or its number from 0.
        shown: text or chat messages as they were given; None for token ids.
        token_ids: what the model gets.
    """

    source: str
    id: str
    shown: str | list[dict] | None
    token_ids: tuple[int, ...]


def prompts_of_texts(texts: Sequence[str], tokenizer: Tokenizer, chat: bool) -> list[Prompt]:
    """Prompts of plain texts; chat: each is a user's message in the checkpoint's template."""
    return [_prompt("texts", str(number), text, tokenizer, chat) for number, text in enumerate(texts)]


def prompts_of_file(path: str | Path, tokenizer: Tokenizer, chat: bool) -> list[Prompt]:
    """Prompts of a JSONL or parquet file with a column `prompt` (text or messages), maybe `id`."""
    data = load_data(Path(path), answer_field=None)
    return [_prompt(data.name, example.id, example.prompt, tokenizer, chat) for example in data.examples]


def prompts_of_tokens(text: str) -> list[Prompt]:
    """Prompts of token ids as in "1,2;3,4,5"."""
    found = []
    for number, part in enumerate(text.split(";")):
        words = [word.strip() for word in part.split(",")]
        if not all(word.isascii() and word.isdecimal() for word in words):
            raise ValueError(f"--prompt-tokens: {part!r} is not a list of token ids like 1,2,3 (prompts "
                             "are separated by ;)")
        found.append(Prompt("tokens", str(number), None, tuple(map(int, words))))
    return found


def _prompt(source: str, identity: str, shown: str | list[dict], tokenizer: Tokenizer, chat: bool) -> Prompt:
    if not shown:
        raise ValueError(f"prompt {identity!r} is empty; give at least one character")
    messages = [{"role": "user", "content": shown}] if chat and isinstance(shown, str) else shown
    ids = tokenizer.encode(messages if isinstance(messages, str) else tokenizer.chat(messages))
    if not ids:
        raise ValueError(f"prompt {identity!r} encodes to no tokens")
    return Prompt(source, identity, shown, tuple(ids))


def requests_of(prompts: Sequence[Prompt], samples: int, max_new_tokens: int) -> list[Request]:
    """`samples` requests a prompt, each with random numbers of its own."""
    return [Request(prompt.token_ids, max_new_tokens, uid(STEP, prompt.source, prompt.id, sample),
                    prompt.source, prompt.id, group, sample)
            for group, prompt in enumerate(prompts) for sample in range(samples)]
