"""Configuration on disk and on the command line: TOML, `section.key=value`, what may change at resume."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.settings import from_text, from_toml, kinds, leaves

# Settings that decide no bit of the training, and so may change when a run is resumed. The number
# of processes is no setting at all.
MAY_DIFFER = ("run.steps", "run.save_every", "run.eval_every", "run.log_every", "run.dir", "run.resume", "run.trackers")

SECTIONS = ("model", "data", "rollout", "rollout.capacity", "learner", "run")

# Names that other frameworks use for settings that exist here.
SYNONYMS = {
    "lr": "learner.learning_rate",
    "beta": "learner.kl_coefficient",
    "kl_coef": "learner.kl_coefficient",
    "mask_truncated_completions": "learner.mask_truncated",
    "loss_agg_mode": "learner.denominator",
    "loss_type": "learner.denominator",
    "adv_estimator": "learner.advantage",
    "scale_rewards": "learner.advantage",
    "max_grad_norm": "learner.clip_norm",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "gradient_checkpointing": "learner.recompute",
    "output_dir": "run.dir",
    "max_steps": "run.steps",
}

# What is deliberately absent: pattern over the words of an unknown key, and the sentence.
UNSUPPORTED = (
    (
        r"lora|dora|peft|adapters?",
        "LoRA and other adapters are not supported: all weights but the exit gate are trained",
    ),
    (r"multi_?turn|turns|tools?|agents?", "multi-turn rollouts and tools are not supported: a sample is one response"),
    (r"fsdp2?|deepspeed|zero[123]?|zero_stage", "FSDP and ZeRO are not supported: every process holds the whole model"),
    (
        r"tensor_parallel|tp|tp_size|pipeline_parallel|pp",
        "tensor and pipeline parallelism are not supported: use cohorts",
    ),
    (r"quant\w*|load_in_\w+|gptq|awq|gguf|fp8|int8|int4|nf4", "quantisation is not supported: use float32 or bfloat16"),
    (
        r"server|http|endpoint|base_url|host|port|vllm|sglang",
        "an HTTP server is not supported: the engine is in-process",
    ),
    (r"async|asynchronous|staleness|partial_rollouts?", "asynchronous rollouts are not supported: steps are on-policy"),
    (
        r"top_?p|top_?k|min_?p|typical_p|(repetition|presence|frequency)_penalty",
        "truncated or penalised sampling is not supported in training: log-probs are those of the full softmax at "
        "rollout.temperature; evaluate and generate have --top-k and --top-p",
    ),
    (r"fp16|float16|half|loss_scale|grad_scaler", "float16 is not supported: use model.dtype=bfloat16 or float32"),
)


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a TOML file (None: defaults) with `section.key=value` overrides, last one wins.

    ValueError: unreadable file, unknown key (with the nearest known one), impossible value.
    """
    if path is None:
        return loads("", overrides)
    try:
        return loads(Path(path).read_text(encoding="utf-8"), overrides)
    except OSError as error:
        raise ValueError(f"config {path}: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path}: not valid TOML: {error}") from error


def loads(text: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The same from the text of a TOML file."""
    known = leaves(TrainConfig)
    values = {name: from_toml(value, _kind(name, known)) for name, value in _flatten(tomllib.loads(text)).items()}
    for override in overrides:
        name, equals, value = (part.strip() for part in override.partition("="))
        if not equals:
            raise ValueError(f"override {override!r}: write section.key=value, for example run.steps=50")
        values[name] = from_text(value, _kind(name, known))

    def make(section: type, prefix: str) -> Any:
        arguments = {}
        for name, kind in kinds(section).items():
            if is_dataclass(kind):
                arguments[name] = make(kind, f"{prefix}{name}.")
            elif f"{prefix}{name}" in values:
                arguments[name] = values[f"{prefix}{name}"]
        return section(**arguments)

    return make(TrainConfig, "")


def to_table(config: TrainConfig) -> dict[str, Any]:
    """Nested dict of plain values; None is written "none"."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return {name: plain(getattr(value, name)) for name in kinds(type(value))}
        return list(value) if isinstance(value, tuple) else "none" if value is None else value

    return plain(config)


def to_toml(config: TrainConfig) -> str:
    """The effective configuration, every setting named; `load` gives the same configuration back."""
    lines: list[str] = []

    def write(table: dict[str, Any], name: str) -> None:
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in table.items() if not isinstance(value, dict))
        lines.append("")
        for key, value in table.items():
            if isinstance(value, dict):
                write(value, f"{name}.{key}")

    for section, table in to_table(config).items():
        write(table, section)
    return "\n".join(lines)


def fingerprint(config: TrainConfig) -> str:
    """sha256 over every setting that may not change when a run is resumed."""
    return hashlib.sha256(json.dumps(_frozen(config), sort_keys=True).encode()).hexdigest()


def difference(saved: TrainConfig, wanted: TrainConfig) -> list[str]:
    """Forbidden changes, one sentence each; empty exactly where the fingerprints are equal."""
    before, after = _frozen(saved), _frozen(wanted)
    changed = [name for name in before if before[name] != after[name]]
    return [
        f"{name} was {before[name]!r} and is now {after[name]!r}: set it back or start a new run" for name in changed
    ]


def _frozen(config: TrainConfig) -> dict[str, Any]:
    values = _flatten(to_table(config))
    if config.learner.schedule != "constant":
        # The rate depends on run.steps where no horizon is given, although run.steps itself may change.
        values["learner.schedule_steps"] = config.learner.schedule_steps or config.run.steps
    return {name: value for name, value in values.items() if name not in MAY_DIFFER}


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value. An empty table of an unknown name stays, so that it is refused like its keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        flat.update(inner or ({} if f"{prefix}{key}" in SECTIONS else {f"{prefix}{key}": value}))
    return flat


def _kind(name: str, known: dict[str, Any]) -> Any:
    """Annotation of a setting; ValueError for an unknown one, saying why or what was meant."""
    if name in known:
        return known[name]
    if name in SECTIONS:
        raise ValueError(f"{name} is a section: set one of its keys, for example {_nearest(name, known)}")
    words = re.sub(r"[^a-z0-9]+", "_", name.lower())
    for pattern, sentence in UNSUPPORTED:
        if re.search(rf"(^|_)({pattern})(_|$)", words):
            raise ValueError(f"{name}: {sentence}")
    raise ValueError(f"unknown setting {name}: did you mean {_nearest(name, known)}?")


def _nearest(name: str, known: dict[str, Any]) -> str:
    own = name.rpartition(".")[2].replace("-", "_")
    elsewhere = [other for other in known if other.rpartition(".")[2] == own]
    if elsewhere or own in SYNONYMS:
        return " or ".join(elsewhere or [SYNONYMS[own]])
    return difflib.get_close_matches(name, known, 1, 0.0)[0]


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(part) for part in value)}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)
