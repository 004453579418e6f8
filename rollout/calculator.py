"""The embedded task: the calculator steps in GSM8K's answers, such as `<<48+27=75>>`.

A step has two integer operands of at most 3 digits and an exact integer result from 0 to 999. The
prompts of training are the distinct steps of GSM8K's train file; held out are the distinct steps
that occur only in its test file. Distinct means as written: `27+48` in training does not bar
`48+27` from the held-out set. Pre-training problems are made by `problems`, never a step that the
caller excludes.

The model reads `\\n48+27=` and writes the result's digits in the order in which one computes them,
ones first, and a newline: `57\\n`. The newline both begins and ends a text (bos and eos).

    python -m rollout.calculator --train train.jsonl --test test.jsonl --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from models.cli import run_cli
from rollout.rewards import Sample
from rollout.sources import read_jsonl

LARGEST = 999
STEP = re.compile(r"<<\s*([0-9]{1,3})\s*([-+*/])\s*([0-9]{1,3})\s*=\s*([0-9]{1,3})\s*>>")
ANSWER = re.compile(r"([0-9]{1,3})(?:\n|\Z)")
SYMBOLS = "\n0123456789+-*/="  # a symbol's place is its token id; the newline, id 0, is bos and eos

# Shares of the problems made for pre-training.
OPERATORS, OPERATOR_SHARES = "+-*/", (0.35, 0.30, 0.22, 0.13)
DIGITS, DIGIT_SHARES = (1, 2, 3), (0.2, 0.5, 0.3)
TENS, FIVES = 0.25, 0.10  # of the operands, rounded down to a multiple of 10 or 5
SMALL = 0.60  # of the products and quotients, with one operand (the divisor) from 2 to 9


class Step(NamedTuple):
    """One calculation: `a` `op` `b` = `c`; all 0 to 999, `op` one of + - * /, exact."""

    a: int
    op: str
    b: int
    c: int


def prompt_text(a: int, op: str, b: int) -> str:
    """What the model reads: `\\n48+27=`."""
    return f"\n{a}{op}{b}="


def answer_text(c: int) -> str:
    """What the model shall write for the result `c`: `57\\n` for 75."""
    return str(c)[::-1] + "\n"


def parse(text: str) -> int | None:
    """The number that a response writes, ones digit first; None unless it is 1 to 3 digits and an end.

    The end is a newline or the end of the text, for a decoder that leaves the eos token out; whether
    the model ended it there only the finish reason can tell.
    """
    match = ANSWER.match(text)
    return None if match is None else int(match[1][::-1])


def reward(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """1 for the right number, else 0; the part `parsed` tells whether there was a number at all.

    A response that was cut at its length limit has not ended and is no answer.
    """
    results = []
    for sample in samples:
        found = None if sample.finish_reason == "length" and "\n" not in sample.text else parse(sample.text)
        results.append({"reward": float(found == int(sample.answer)), "parsed": float(found is not None)})
    return results


def extract(gsm8k_train_path: str | Path, gsm8k_test_path: str | Path) -> tuple[list[Step], list[Step]]:
    """The distinct steps of the train file, and those of the test file that the train file lacks.

    Both in the order of their first occurrence. Errors: ValueError for a file that is not GSM8K.
    """
    train, test = (dict.fromkeys(_steps(path)) for path in (gsm8k_train_path, gsm8k_test_path))
    return list(train), [step for step in test if step not in train]


def problems(count: int, seed: int, exclude: Collection[Step] = (), start: int = 0) -> list[Step]:
    """`count` made-up problems, numbers `start` to `start + count - 1` of the sequence of `seed`.

    Each is a pure function of seed, number and `exclude` (give a set or dict), so a batch can be
    made again without the ones before it. Problems may repeat.
    """
    return [_problem(random.Random(f"calculator {seed} {number}"), exclude) for number in range(start, start + count)]


def build_tokenizer(path: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of the task's 16 symbols into a folder.

    Token ids: newline 0 (bos and eos, no pad), digits 1 to 10, then + - * / = (11 to 15). Any other
    symbol is refused when it is encoded. The newline counts as special: decoded text is without it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({symbol: token for token, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["\n"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "\n", "eos_token": "\n"}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the steps of GSM8K as the files that the task `calculator` reads."""
    parser = argparse.ArgumentParser(prog="python -m rollout.calculator", description=main.__doc__)
    parser.add_argument("--train", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--test", required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--out", required=True, help="folder for train.jsonl and test.jsonl")
    options = parser.parse_args(argv)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for split, steps in zip(("train", "test"), extract(options.train, options.test), strict=True):
        rows = ({"id": f"{a}{op}{b}", "prompt": f"{a}{op}{b}=", "answer": str(c)} for a, op, b, c in steps)
        _write(folder / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / split}.jsonl: {len(steps)} steps")
    return 0


def _steps(path: str | Path) -> Iterator[Step]:
    """The steps of a GSM8K file in order, repeated ones too; what is not exact is left out."""
    if not Path(path).is_file():
        raise ValueError(f"GSM8K file {str(path)!r} not found")
    for where, row in read_jsonl(path):
        if not isinstance(row.get("answer"), str):
            raise ValueError(f"{where}: has no text 'answer'; give GSM8K's own file")
        for a, op, b, c in STEP.findall(row["answer"]):
            step = Step(int(a), op, int(b), int(c))
            if _result(step.a, op, step.b) == step.c:
                yield step


def _result(a: int, op: str, b: int) -> int | None:
    """The exact result from 0 to 999; None where there is none."""
    if op == "/":
        found = a // b if b and a % b == 0 else -1
    else:
        found = {"+": a + b, "-": a - b, "*": a * b}[op]
    return found if 0 <= found <= LARGEST else None


def _problem(draw: random.Random, exclude: Collection[Step]) -> Step:
    """One problem. The operator is drawn once, so that its share does not depend on how often operands fail."""
    op = draw.choices(OPERATORS, OPERATOR_SHARES)[0]
    small = op in "*/" and draw.random() < SMALL
    while True:
        a, b = _operand(draw), draw.randint(2, 9) if small else _operand(draw)
        if op == "/":
            a *= b  # drawn from the result, since few quotients are whole
        elif (op == "-" and a < b) or (small and draw.random() < 0.5):
            a, b = b, a
        c = _result(a, op, b)
        if c is not None and a <= LARGEST and (step := Step(a, op, b, c)) not in exclude:
            return step


def _operand(draw: random.Random) -> int:
    digits = draw.choices(DIGITS, DIGIT_SHARES)[0]
    number = draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    rounding = draw.random()
    if digits > 1 and rounding < TENS + FIVES:
        number -= number % (10 if rounding < TENS else 5)
    return number


def _write(file: Path, text: str) -> None:
    """Write whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    run_cli(main)
