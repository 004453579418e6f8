"""GSM8K: reading the problems, and what a response answers under two documented rules.

The same rules grade in training and in evaluation. Both first cut the text at the first stop text
("\\nQuestion:": what follows is a problem of the model's own), then look at all that is left,
however long it is.

strict    the number right behind the last `####` that has a number there, on the same line; blanks
          and markup (`*`, `_`, `` ` ``) may stand between.
flexible  the strict answer; else the last `\\boxed{...}`, which must hold exactly one number behind
          its last "=", otherwise there is no answer; else the last number of the text.

A number is `18`, `1,234` (commas between groups of three), `18.00`, `.5` or a fraction `3/4`
without blanks, compared exactly: `18.00` equals `18`.

- Currency signs in front ($, also `\\$`) are passed over; a unit or percent sign behind is ignored
  (`50%` is 50). Markup such as `**18**` is no part of a number.
- A minus is `-`, U+2212 or an en dash that touches the number or its currency and does not follow
  a digit, letter, closing bracket or percent sign. So `x = -18` and `-$18` are negative; `10-18`
  and `10–18` are ranges and end in 18. With a blank behind it, it is a subtraction or a bullet. An
  em dash is never a minus.
- LaTeX thousands (`1{,}234`, `1\\,234`) are read; thousands set apart by blanks or points, powers of
  ten and mixed numbers are not.
- A number of more than 100 digits, or a fraction over 0, is an answer that equals nothing.

A gold answer must be one number and nothing else. One that is not scores 0 whatever the response
says (two unreadable answers are never equal), and `load` refuses its row.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from rollout.data import DataSet, load_data, make_data
from rollout.rewards import Sample

STOP_STRINGS = ("\nQuestion:",)
RULES = ("flexible", "strict")
MARKER = "####"
HUB_NAME, HUB_CONFIGURATION = "openai/gsm8k", "main"
MOST_DIGITS = 100

# No repetition can be divided in more than one way, so the time is linear in the text. Comma groups
# may give back their last one: "1,234,5678" is 1234 and then 5678.
NUMBER = re.compile(r"""
    (?P<minus>(?<![0-9A-Za-z)\]}%])[-−–])?
    (?:\\?[$€£¥₹][ ]?(?P<inner_minus>[-−–])?)?
    (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9A-Za-z])(?=\.[0-9]))
    (?P<decimals>\.[0-9]+)?
    (?P<divisor>/[0-9]+)?
    """, re.VERBOSE)
BETWEEN_MARKER_AND_NUMBER = re.compile(r"[ \t*_`]*")
LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3})")


def score(text: str, answer: str, rule: str = "flexible", stop_strings: Sequence[str] = STOP_STRINGS) -> float:
    """1.0 where `text` answers `answer` under `rule`, else 0.0.

    Args:
        text: a response.
        answer: the gold answer, `18` or a whole GSM8K solution that ends in `#### 18`.
    """
    wanted = gold(answer)
    return float(wanted is not None and extract(text, rule, stop_strings) == wanted)


def extract(text: str, rule: str = "flexible", stop_strings: Sequence[str] = STOP_STRINGS) -> Fraction | None:
    """The final answer of a response; None where it gives none. Errors: ValueError for an unknown rule."""
    if rule not in RULES:
        raise ValueError(f"answer rule {rule!r}; choose {' or '.join(map(repr, RULES))}")
    for stop in stop_strings:
        text = text.partition(stop)[0]
    text = LATEX_THOUSANDS.sub(",", text)
    marked = _marked_number(text)
    if marked is not None:
        return _value(marked)
    if rule == "strict":
        return None
    box = _last_box(text)
    if box is not None:
        numbers = list(NUMBER.finditer(box.rpartition("=")[2]))
        return _value(numbers[0]) if len(numbers) == 1 else None
    last = deque(NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def gold(answer: str) -> Fraction | None:
    """The number that a gold answer is; None where it is not one number and nothing else."""
    match = NUMBER.fullmatch(answer.rpartition(MARKER)[2].strip())
    return None if match is None else _value(match)


def reward(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """The flexible score; the strict one and whether an answer was found are reported as parts."""
    return [{"reward": score(sample.text, sample.answer),
             "strict": score(sample.text, sample.answer, "strict"),
             "parsed": float(extract(sample.text) is not None)} for sample in samples]


def load(spec: str | Path, split: str = "train", *, prompt_field: str = "question", answer_field: str = "answer",
         id_field: str = "id", limit: int | None = None) -> DataSet:
    """GSM8K rows as examples: the question, the number behind `####` as answer, `fields["solution"]`.

    Args: as of `load_data`; "openai/gsm8k" means its configuration "main".
    Errors: ValueError; also for rows whose answer is no number, naming them.
    """
    if str(spec) == HUB_NAME:
        spec = f"{HUB_NAME}:{HUB_CONFIGURATION}"
    data = load_data(spec, split=split, prompt_field=prompt_field, answer_field=answer_field,
                     id_field=id_field, limit=limit)
    examples, unreadable = [], []
    for example in data.examples:
        value = gold(example.answer)
        if value is None or not isinstance(example.prompt, str):
            unreadable.append(example.id)
        else:
            fields = {**example.fields, "solution": example.answer}
            examples.append(dataclasses.replace(example, answer=str(value), fields=fields))
    if unreadable:
        raise ValueError(f"data {str(spec)!r}: {len(unreadable)} of {len(data.examples)} rows are no GSM8K problems "
                         f"(ids {', '.join(unreadable[:5])}): the question must be text, and the answer one number, "
                         f"alone or behind {MARKER}; mend or drop them")
    return make_data(data.name, examples)


def _marked_number(text: str) -> re.Match | None:
    """The number behind the last marker that has one."""
    end = len(text)
    while (at := text.rfind(MARKER, 0, end)) >= 0:
        match = NUMBER.match(text, BETWEEN_MARKER_AND_NUMBER.match(text, at + len(MARKER)).end())
        if match is not None:
            return match
        end = at
    return None


def _last_box(text: str) -> str | None:
    """What the last \\boxed{...} of the text holds; None where there is none or it is not closed."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1 if box else 0
    for brace in re.finditer("[{}]", rest if box else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            # Braces become blanks, so that the two numbers of \\frac{3}{4} stay two.
            return re.sub("[{}]", " ", rest[:brace.start()])
    return None


def _value(number: re.Match) -> Fraction | None:
    whole, decimals, divisor = (number[name] or "" for name in ("whole", "decimals", "divisor"))
    if len(whole) + len(decimals) > MOST_DIGITS or len(divisor) > MOST_DIGITS or set(divisor) == set("/0"):
        return None
    value = Fraction((whole.replace(",", "") or "0") + decimals)
    if divisor:
        value /= int(divisor[1:])
    return -value if number["minus"] or number["inner_minus"] else value
