"""Reading and writing model folders: `config.json` + safetensors, single or sharded.

Strict: a missing, extra or mis-shaped tensor is an error that names it. Loaded tensors get
storage of their own; views of a mapped file need not be 16-byte aligned, and alignment
decides bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models import ouro
from models.config import ModelConfig
from models.linear import choose_linear
from models.looped import LoopedLM
from models.numerics import dtype_name, dtype_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16", "F64")
# What other tools need beside the weights, carried along by a save.
COMPANIONS = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json",
              "added_tokens.json", "chat_template*", "generation_config.json", "*.py")


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model folder. ValueError names file and field."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model = {str(path)!r} is not a folder; give one that holds config.json "
                         f"and {SINGLE}")
    return ouro.parse(_read_json(folder / "config.json"))


def load_model(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu",
               profile: str = "hf", linear: str = "native") -> LoopedLM:
    """Load a published or saved model folder in `dtype` on `device`.

    linear: `native`, `packed` or `auto` (`models.linear.choose_linear`). Errors: ValueError
    naming the folder, file, field or tensor that is at fault.
    """
    kind = dtype_of(dtype)
    config = read_config(path)
    linear = choose_linear(linear, kind, device, config.hidden * config.heads * config.head_dim)
    wanted = ouro.tensor_names(config)
    places = check_tensors(path, config)
    weights: dict[str, Tensor] = {}
    for place in sorted(set(places.values())):
        with safe_open(place, framework="pt") as file:
            for name, official in wanted.items():
                if places[official] == place:
                    stored = file.get_tensor(official)
                    weights[name] = torch.empty(stored.shape, dtype=kind, device=device).copy_(stored)
    return LoopedLM(config, weights, profile=profile, linear=linear)


def check_tensors(path: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Official tensor name -> file, after checking names, shapes and dtypes by the headers alone.

    Errors: ValueError naming the folder and the first tensor that is missing, unexpected or
    not as the config says.
    """
    wanted, shapes = ouro.tensor_names(config), config.weight_shapes()
    places = _tensor_places(Path(path))
    extra = sorted(set(places) - set(wanted.values()))
    if config.tied and extra == ["lm_head.weight"]:
        raise ValueError(f"{path}: tensor 'lm_head.weight' stands beside tie_word_embeddings = true; "
                         "remove one of the two")
    if extra:
        raise ValueError(f"{path}: unexpected tensor {extra[0]!r} ({len(extra)} in all)")
    missing = sorted(set(wanted.values()) - set(places))
    if missing:
        raise ValueError(f"{path}: missing tensor {missing[0]!r} ({len(missing)} in all)")
    for place in sorted(set(places.values())):
        with safe_open(place, framework="pt") as file:
            for name, official in wanted.items():
                if places[official] != place:
                    continue
                stored = file.get_slice(official)
                if tuple(stored.get_shape()) != shapes[name]:
                    raise ValueError(f"{path}: tensor {official!r} has shape "
                                     f"{tuple(stored.get_shape())}, the config says {shapes[name]}")
                if stored.get_dtype() not in STORED_DTYPES:
                    raise ValueError(f"{path}: tensor {official!r} has dtype {stored.get_dtype()}; "
                                     "quantised or integer weights are not supported")
    return places


def _tensor_places(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. An index is trusted only as far as the files agree with it."""
    if (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            raise ValueError(f"{folder} holds {SINGLE} and {INDEX}, which may disagree; remove one")
        mapping = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not all(
                isinstance(name, str) and name == Path(name).name for name in mapping.values()):
            raise ValueError(f"{folder / INDEX}: weight_map must be an object of tensor name -> "
                             "file name")
        files = sorted(set(mapping.values()))
    else:
        mapping, files = None, [SINGLE]
    places: dict[str, Path] = {}
    for name in files:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: {name} is missing")
        try:
            with safe_open(file, framework="pt") as opened:
                found = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
        twice = sorted(set(found) & set(places))
        if twice:
            raise ValueError(f"{folder}: tensor {twice[0]!r} stands in {places[twice[0]].name} and "
                             f"in {name}")
        places |= {key: file for key in found}
    if mapping is not None:
        for key, name in mapping.items():
            if places.get(key) != folder / name:
                raise ValueError(f"{folder / INDEX}: tensor {key!r} is not in {name}")
        loose = sorted(set(places) - set(mapping))
        if loose:
            raise ValueError(f"{folder / INDEX}: tensor {loose[0]!r} stands in a shard but not in "
                             "the index")
    return places


def _read_json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return found


def save_model(model: LoopedLM, path: str | Path, *, source: str | Path | None = None,
               weights: Mapping[str, Tensor] | None = None) -> None:
    """Write `model` as a folder that this and other tools load.

    path: must not exist yet, or be an empty folder. source: folder whose tokenizer, chat
    template, generation config and remote-code files are carried along. weights: canonical
    tensors to write instead of the compute copy (float32 masters, say).

    Errors: ValueError for a used path or an absent source, RuntimeError when `weights` lacks
    a tensor. Written beside the target and renamed.
    """
    folder = Path(path).absolute()
    values = model.weights if weights is None else weights
    names = ouro.tensor_names(model.config)
    missing = [name for name in names if name not in values]
    if missing:
        raise RuntimeError(f"save to {str(path)!r}: tensor {missing[0]!r} is missing")
    if source is not None and not Path(source).is_dir():
        raise ValueError(f"save to {str(path)!r}: source = {str(source)!r} is not a folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"save to {str(path)!r}: it exists and is not empty; name a new folder")
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {names[name]: values[name].detach().cpu().contiguous() for name in names}
    save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
    kind = dtype_name(values["embed"].dtype)
    config = {**ouro.to_json(model.config), "torch_dtype": kind}
    if "dtype" in config:
        config["dtype"] = kind
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if source is not None:
        for pattern in COMPANIONS:
            for file in sorted(Path(source).glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
