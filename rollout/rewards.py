"""Rewards: functions of the user's that grade a batch of samples, and the checks around them.

A reward is `reward(samples) -> list`, one result a sample, in order. A result is

- a number or a bool: the reward (0.0 is a reward like any other);
- None or NaN: unscored, the sample takes no part in its group's statistics;
- a dict of named numbers: with a key "reward" that is the reward and the others are parts, only
  reported; without it the reward is the sum of all parts, in the dict's order, and unscored if one
  of them is. An unscored part is left out of the record.

Infinities are refused: one of them would erase its whole group. No clock, alarm or thread is used
here; a reward that can hang must bound itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one sample.

    Attributes:
        prompt: of the example: text, or chat messages.
        text: the response, cut at the stop string that ended it, special tokens left out.
        answer: of the example.
        token_ids: the response's ids as they were sampled, the stop token included.
        finish_reason: as the engine gives it; "length" for a response that was cut.
        example_id: id within the data set.
        fields: the example's other columns.
    """

    prompt: str | list[dict]
    text: str
    answer: str
    token_ids: tuple[int, ...]
    finish_reason: str
    example_id: str
    fields: dict


@dataclass(frozen=True)
class Score:
    """A checked result.

    Attributes:
        value: the reward, finite; None for an unscored sample.
        parts: named finite numbers, for metrics and the sample log.
    """

    value: float | None
    parts: dict[str, float]


Reward = Callable[[Sequence[Sample]], Sequence[object]]


def load_reward(spec: str) -> Reward:
    """The function that `spec` names: "path/file.py:function" or "package.module:function".

    A file is loaded by its path alone: sys.path stays as it is, and the module gets a name that no
    import can clash with. What the file imports must therefore be importable without it.
    Errors: ValueError naming the file or module and what is wrong with it.
    """
    place, colon, function = spec.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise ValueError(f"reward = {spec!r}; write path/file.py:function or package.module:function")
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(Path(place)) if is_file else _import_module(place)
    if not hasattr(module, function):
        known = sorted(name for name, value in vars(module).items()
                       if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_")
        raise ValueError(f"reward = {spec!r}: {place} has no {function!r}; its functions are "
                         f"{', '.join(known) or 'none'}")
    reward = getattr(module, function)
    if not callable(reward):
        raise ValueError(f"reward = {spec!r}: {function!r} is a {type(reward).__name__}, not a function")
    return reward


def score(reward: Reward, samples: Sequence[Sample]) -> list[Score]:
    """One checked score a sample, in order.

    Errors: RuntimeError where the reward raises (naming the sample, the original error as its
    cause), returns another number of results than samples, or returns what is no result.
    """
    if not samples:
        return []
    try:
        results = reward(samples)
    except (Exception, SystemExit) as error:
        _raise_for_sample(reward, samples)
        raise RuntimeError(f"the reward failed on the batch of {len(samples)} samples, though on none of them alone "
                           f"(the first is of example {samples[0].example_id!r}): {_reason(error)}") from error
    if not isinstance(results, list | tuple) and getattr(results, "ndim", None) != 1:
        raise RuntimeError(f"the reward returned a {type(results).__name__}; it must return a list, one result a "
                           "sample")
    if len(results) != len(samples):
        raise RuntimeError(f"the reward returned {len(results)} results for {len(samples)} samples; it must return one "
                           "a sample, in order (None for an unscored one)")
    return [_score(result, f"sample {index} (example {sample.example_id!r})")
            for index, (result, sample) in enumerate(zip(results, samples, strict=True))]


def _raise_for_sample(reward: Reward, samples: Sequence[Sample]) -> None:
    """After a failure on the whole batch: ask sample by sample, and raise for the first that fails."""
    for index, sample in enumerate(samples):
        try:
            reward([sample])
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"the reward failed on sample {index} (example {sample.example_id!r}): "
                               f"{_reason(error)}") from error


def _score(result: object, where: str) -> Score:
    if not isinstance(result, dict):
        return Score(value=_number(result, where), parts={})
    if not result or not all(isinstance(name, str) for name in result):
        raise RuntimeError(f"{where}: reward {result!r}; a dict must hold named numbers")
    numbers = {name: _number(value, f"{where}, part {name!r}") for name, value in result.items()}
    if "reward" in numbers:
        value = numbers.pop("reward")
    elif None in numbers.values():
        value = None
    else:
        value = _number(sum(numbers.values()), f"{where}, sum of the parts")
    return Score(value=value, parts={name: number for name, number in numbers.items() if number is not None})


def _number(value: object, where: str) -> float | None:
    """A finite float, or None for None and NaN. Scalars of numpy and torch count as numbers."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise RuntimeError(f"{where}: reward {value!r} is a {type(value).__name__}; expected a number, a bool, None or "
                           "a dict of them")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of float
        number = math.inf
    if math.isinf(number):
        raise RuntimeError(f"{where}: reward {number} is infinite; return a finite number, or None to leave the sample "
                           "unscored")
    return None if math.isnan(number) else number


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"reward file {str(file)!r} not found (looked at {file.absolute()})")
    path = file.resolve()
    name = "reprise_reward_" + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {str(file)!r}: not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    # Registered while it runs and after: dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"reward file {str(file)!r} cannot be loaded: {_reason(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"reward module {name!r} cannot be imported: {_reason(error)}") from error
        raise ValueError(f"reward module {name!r} not found: no module {error.name!r} on PYTHONPATH; for a file write "
                         "path/file.py:function") from error
    except Exception as error:
        raise ValueError(f"reward module {name!r} cannot be imported: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}"
