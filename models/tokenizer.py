"""Text to token ids and back, with the checkpoint's own files and nothing built in.

Reads `tokenizer.json` (required), `tokenizer_config.json`, `generation_config.json` and
`chat_template.jinja` (each optional). It knows no model and no sampling defaults: of
`generation_config.json` only `eos_token_id` is read, so a checkpoint cannot bring penalties or
top-k into a rollout.

The chat template is whatever the folder ships. A turn-end token that no file declares as eos
(early -Thinking checkpoints) is not guessed from it: name its id as the caller's stop id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

# The special tokens that a chat template may name, as tokenizer_config.json spells them.
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one model folder.

    Attributes:
        folder: where it was read from; named in errors.
        backend: the `tokenizers` object. Truncation and padding are off whatever the file says:
            a prompt is never cut in silence.
        stop_ids: sorted eos ids of tokenizer_config.json and generation_config.json. The eos ids
            of config.json are not in it; `stop_ids()` below forms the union.
        vocab_size: highest token id + 1: a model with fewer rows in its embedding does not fit.
        chat_template: jinja2 source, None where the folder has none.
        special: text of bos_token, eos_token, unk_token and pad_token, those that are declared.
    """

    folder: Path
    backend: tokenizers.Tokenizer = field(repr=False, compare=False)
    stop_ids: tuple[int, ...]
    vocab_size: int
    chat_template: str | None
    special: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special token is added, one written out in the text is recognised.

        Errors: ValueError where the vocabulary has no token for a part of the text.
        """
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the backend raises plain Exception, for lack of an unknown token
            raise ValueError(f"{self.folder / 'tokenizer.json'}: cannot encode {text[:60]!r}: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: list[dict]) -> str:
        """The chat template's text for `messages`, up to where the assistant's answer begins.

        Special tokens stand written out in the text; `encode` turns them into their ids.
        Errors: ValueError where the folder has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.folder}: has no chat template (chat_template.jinja, or chat_template in "
                             "tokenizer_config.json); give the prompt as text, or use an instruction-tuned checkpoint")
        try:
            return _environment().from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.special)
        except Exception as error:  # the template is the checkpoint's code and may fail in any way
            raise ValueError(f"{self.folder}: chat template failed: {type(error).__name__}: {error}") from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a model folder. Errors: ValueError naming the file and the field."""
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file}: not found; the folder of a model must hold its tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the backend raises plain Exception for whatever it cannot read
        raise ValueError(f"{file}: not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config_file = folder / "tokenizer_config.json"
    config = _read_object(config_file)
    special = {}
    for name in TEMPLATE_TOKENS:
        text = _token_text(config.get(name), config_file, name)
        if text is not None:
            special[name] = text
    ids = set(_generation_eos(folder / "generation_config.json"))
    if "eos_token" in special:
        ids.add(_token_id(backend, special["eos_token"], config_file))
    # Declared special tokens that tokenizer.json holds as ordinary ones: special from here on, as
    # other tools treat them, so that an end-of-text token never shows in the text.
    backend.add_special_tokens([text for text in special.values() if backend.token_to_id(text) is not None])
    return Tokenizer(folder=folder, backend=backend, stop_ids=tuple(sorted(ids)),
                     vocab_size=max(backend.get_vocab().values(), default=-1) + 1,
                     chat_template=_chat_template(folder, config, config_file), special=special)


def stop_ids(config_eos: Iterable[int], tokenizer: Tokenizer, caller: Iterable[int] = ()) -> tuple[int, ...]:
    """Every id that ends a response: config.json's, the tokenizer folder's and the caller's, sorted.

    The three disagree in published checkpoints; stopping on one of them only runs past the end.
    Errors: ValueError for an id that is no non-negative integer.
    """
    union = set()
    for source, ids in (("eos_token_id of config.json", config_eos), ("eos of the tokenizer", tokenizer.stop_ids),
                        ("stop id of the caller", caller)):
        for token in ids:
            if not _is_id(token):
                raise ValueError(f"{source}: {token!r} is no token id; give an integer of at least 0")
            union.add(token)
    return tuple(sorted(union))


def _environment():
    """The sandbox that renders chat templates: no attribute of Python is in reach, and no clock.

    `strftime_now`, which some templates ask for, is left out on purpose: a prompt that depends on
    the day cannot be replayed. jinja2 is imported here, since a prompt of plain text needs none.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, indent=None):
        # jinja2's own filter escapes <, > and & for HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment


def _chat_template(folder: Path, config: dict, config_file: Path) -> str | None:
    """chat_template.jinja where there is one, else "chat_template": a text, or the one named 'default'."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from error
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{config_file}: chat_template must be a text or a list of named templates, "
                         f"found {type(found).__name__}")
    named = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(named.get("default"), str):
        raise ValueError(f"{config_file}: chat_template has no template named 'default', only {list(named)}")
    return named["default"]


def _token_text(entry: object, file: Path, name: str) -> str | None:
    """The text of a special token: a string, or an AddedToken written as an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if entry is not None and not isinstance(text, str):
        raise ValueError(f"{file}: {name} = {entry!r}; expected a text or an object with a text 'content'")
    return text


def _token_id(backend: tokenizers.Tokenizer, text: str, file: Path) -> int:
    token = backend.token_to_id(text)
    if token is None:
        raise ValueError(f"{file}: eos_token = {text!r} is not in tokenizer.json; the two files do not belong together")
    return token


def _generation_eos(file: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json: an id, a list of ids, or none."""
    found = _read_object(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if not _is_id(token):
            raise ValueError(f"{file}: eos_token_id = {found!r}; expected a token id or a list of them")
    return tuple(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_object(file: Path) -> dict:
    """The JSON object in `file`; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ValueError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found
