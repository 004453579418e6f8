"""A model folder with a byte tokenizer, and plug-in rewards, for runs from files to checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tiny_models import tiny_model
from tokenizers import decoders, models, pre_tokenizers

from models.checkpoint import save_model
from models.ouro import new_source, parse

REWARD = '''
def vowels(samples):
    """Share of bytes that are vowels, in steps of a quarter: spread within groups for random models."""
    return [round(4 * sum(c in "aeiouAEIOU" for c in s.text) / max(len(s.text), 1)) / 4 for s in samples]

def token_parity(samples):
    return [{"reward": float(sum(s.token_ids) % 2), "length": float(len(s.token_ids))} for s in samples]
'''


def write_model(folder: Path) -> Path:
    """A random model of 2 layers and 3 loops over bytes; id 256 ends a text."""
    source = new_source(hidden=16, intermediate=24, layers=2, heads=2, vocab=257, loops=3, max_positions=1024,
                        eos_id=256, bos_id=256)
    config = parse(source)
    from dataclasses import asdict

    sizes = {name: value for name, value in asdict(config).items() if name != "source"}
    model = tiny_model(dtype=__import__("torch").float32, **sizes, source=source)
    save_model(model, folder)
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    return folder


def write_data(file: Path, count: int = 10) -> Path:
    """`count` short prompts."""
    file.write_text("".join(json.dumps({"prompt": f"say {n} ", "answer": str(n)}) + "\n" for n in range(count)),
                    encoding="utf-8")
    return file


def write_reward(file: Path) -> Path:
    """The rewards above as a file."""
    file.write_text(REWARD, encoding="utf-8")
    return file


def overrides(folder: Path, **changes) -> list[str]:
    """Settings of a run of two cohorts, two prompts a cohort, in `folder`/run."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_data(folder / "data.jsonl")
        write_reward(folder / "rewards.py")
    found = {
        "model.path": folder / "model", "data.path": folder / "data.jsonl",
        "data.reward": f"{folder / 'rewards.py'}:token_parity", "run.dir": folder / "run",
        "rollout.schedule": "exit:gate=0.6", "rollout.max_new_tokens": 6, "rollout.group_size": 4,
        "rollout.prompts_per_step": 4, "rollout.cohorts": 2, "rollout.capacity.pages": 200,
        "learner.learning_rate": 0.01, "run.steps": 4, "run.save_every": 2, "run.seed": 3,
    } | changes
    return [f"{name}={value}" for name, value in found.items()]
