"""Grading of final answers: a table of odd formats, what is cut, and that gold answers are checked."""

import concurrent.futures
import json
from fractions import Fraction
from pathlib import Path

import pytest

from rollout.data import Example, make_data
from rollout.gsm8k import extract, gold, load, reward, score
from rollout.rewards import Sample, load_reward
from rollout.rewards import score as score_samples

DATA = Path(__file__).parents[1] / "data" / "gsm8k"

# response, strict answer, flexible answer
TABLE = [
    # the marker
    ("so 9+9=18\n#### 18", "18", "18"),
    ("#### 18\nThat took 3 steps.", "18", "18"),
    ("#### 18 eggs, sold for 2 dollars", "18", "18"),
    ("####18", "18", "18"),
    ("#### **18**", "18", "18"),
    ("#### $1,234.00", "1234", "1234"),
    ("#### -$5", "-5", "-5"),
    ("#### $-5", "-5", "-5"),
    ("#### 3 ... #### 4", "4", "4"),
    ("#### 3\nwait, no\n####", "3", "3"),
    ("#### \n18", None, "18"),
    ("#### The answer is 18", None, "18"),
    ("### 18", None, "18"),
    ("\\boxed{5} and then\n#### 18", "18", "18"),
    # no marker: the last box, which then decides alone
    ("so \\boxed{18} since 9 + 9", None, "18"),
    ("\\boxed{3}, no: \\boxed{18}", None, "18"),
    ("\\boxed{x = 10 + 8 = 18}", None, "18"),
    ("\\boxed{\\$1{,}234}", None, "1234"),
    ("\\boxed{1\\,234 \\text{ dollars}}", None, "1234"),
    ("\\boxed{18\\%}", None, "18"),
    ("\\boxed{-\\$18}", None, "-18"),
    ("\\boxed{} after 18 steps", None, None),
    ("\\boxed{\\frac{3}{4}}", None, None),
    ("\\boxed{emptyset} 18", None, None),
    ("\\boxed{18, 20}", None, None),
    ("\\boxed{3} and \\boxed{18", None, "18"),
    # neither: the last number
    ("She earns $18 a day.", None, "18"),
    ("18.", None, "18"),
    ("**18**", None, "18"),
    ("The answer is **-18**.", None, "-18"),
    ("$ 1,234,567.50!", None, "1234567.5"),
    ("\\$18", None, "18"),
    ("€18", None, "18"),
    ("18€", None, "18"),
    ("$.50", None, "0.5"),
    ("50%", None, "50"),
    ("he ate 3/4", None, "3/4"),
    ("0.75", None, "3/4"),
    ("1/0", None, None),
    ("007", None, "7"),
    ("1, 2, 3", None, "3"),
    ("1,2,3", None, "3"),
    ("1,234,5678", None, "5678"),
    ("12345,678", None, "678"),
    ("H2O", None, "2"),
    ("none", None, None),
    ("", None, None),
    # minus signs
    ("x = -18", None, "-18"),
    ("(-18)", None, "-18"),
    ("−18", None, "-18"),
    ("it is –18", None, "-18"),
    ("–$18", None, "-18"),
    ("it is—18", None, "18"),
    ("it is —18", None, "18"),
    ("-$ 18", None, "-18"),
    ("10-18", None, "18"),
    ("10–18", None, "18"),
    ("$10–$18", None, "18"),
    ("(5)-3", None, "3"),
    ("5% -3", None, "-3"),
    ("x-3", None, "3"),
    ("20 - 2", None, "2"),
    ("- 18 apples", None, "18"),
    ("-.5", None, "-1/2"),
    ("-18.0", None, "-18"),
    # too long to be meant
    ("9" * 100, None, "9" * 100),
    ("9" * 101, None, None),
    ("18 " + "9" * 5000, None, None),
    ("1/" + "9" * 5000, None, None),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), TABLE)
def test_odd_formats(text, strict, flexible):
    assert extract(text, "strict") == (strict and Fraction(strict))
    assert extract(text) == extract(text, "flexible") == (flexible and Fraction(flexible))


def test_the_text_is_cut_at_the_stop_text_first():
    """'#### 4\\nQuestion: ... #### 9': one public grader takes 9, the answer to a problem it made up."""
    text = "#### 3 ... #### 4\nQuestion: what is 4+5?\nAnswer: #### 9"
    assert extract(text, "strict") == extract(text) == 4
    assert extract(text, stop_strings=()) == 9
    assert extract("#### 4 STOP #### 5 END #### 6", stop_strings=("END", "STOP")) == 4
    assert extract("18 eggs\nQuestion: 20?\nQuestion: 22?") == 18


def test_an_answer_is_never_lost_by_a_window():
    """One public grader looks at the last 300 characters only."""
    assert score("#### 42\n" + "and so on " * 40, "42") == 1.0
    assert score("the answer is 42 " + "and so on " * 4000, "42") == 1.0


@pytest.mark.parametrize("text", ["\\boxed{}", "emptyset", "", "####"])
def test_two_unreadable_answers_are_not_equal(text):
    """A gold answer and a prediction that both failed to parse once counted as right."""
    for answer in ("", "\\boxed{}", "####", "eighteen", "18 eggs", "1 8"):
        assert gold(answer) is None
        assert score(text, answer) == score(text, answer, "strict") == 0.0


def test_equality_is_of_numbers_not_of_text():
    assert score("#### 18.00", "18") == score("18", "18.0") == score("#### 1234", "1,234") == 1.0
    assert score("#### 1", "18") == score("#### 181", "18") == score("#### -18", "18") == 0.0


def test_a_whole_solution_is_a_gold_answer_too():
    assert score("#### 72", "48/2 = <<48/2=24>>24\n#### 72") == 1.0
    assert gold("#### -5") == -5 and gold("\n $1,234\t") == 1234


def test_strict_wants_the_marker():
    assert (score("the answer is 18", "18", "strict"), score("the answer is 18", "18")) == (0.0, 1.0)
    with pytest.raises(ValueError, match="'loose'; choose 'flexible' or 'strict'"):
        extract("18", "loose")


@pytest.mark.parametrize("piece", [
    "1,234", ",234", "123,456,", "#", "#### ", "-", "\\boxed{", "{", "$ ", " ", "1", "1/", ".", "\\,", "1{,}",
    "\n", "####*"])
def test_long_texts_of_anything_are_graded(piece):
    """A quarter of a megabyte each: an expression that backtracks, or rescans, would not come back."""
    text = piece * (250_000 // len(piece)) + "5x"
    assert score(text, "18") == 0.0
    assert score(text + "\n#### 18", "18", "strict") == 1.0
    assert score("18 " + text, "18", "strict") == 0.0


def test_a_megabyte_is_graded():
    assert score("1" + ",234" * 250_000 + "5", "18") == 0.0
    assert score("#" * 1_000_000 + "18", "18") == 1.0


def test_grading_works_outside_the_main_thread():
    """A grader with an alarm in it kills the worker there."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(score, ["#### 18", "1" * 10_000, "none"], ["18"] * 3)) == [1.0, 0.0, 0.0]


def test_the_shipped_problems_load_and_their_own_solutions_score_1():
    for split, count in (("train", 40), ("test", 24)):
        data = load(DATA, split)
        assert (data.name, len(data.examples)) == (split, count)
        for example, line in zip(data.examples, (DATA / f"{split}.jsonl").read_text().splitlines(), strict=True):
            row = json.loads(line)
            assert (example.prompt, example.fields["solution"]) == (row["question"], row["answer"])
            for rule in ("strict", "flexible"):
                assert score(row["answer"], example.answer, rule) == 1.0
    assert [example.answer for example in load(DATA, "train", limit=3).examples] == ["72", "10", "5"]
    assert [example.answer for example in load(DATA, "test").examples[-2:]] == ["2125", "-10"]


def test_a_gold_answer_that_is_no_number_is_flagged_at_load_time(tmp_path):
    file = tmp_path / "train.jsonl"
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "no marker, 18"},
            {"question": "c", "answer": "1 + 2 #### "}, {"question": [{"role": "user", "content": "d"}], "answer": "4"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"3 of 4 rows are no GSM8K problems \(ids 1, 2, 3\)"):
        load(file)


def test_the_hub_name_means_its_main_configuration(monkeypatch):
    asked = []

    def load_data(spec, *, split, **options):
        asked.append((spec, split))
        return make_data("hub", [Example(id="0", prompt="q", answer="#### 1", fields={})])

    monkeypatch.setattr("rollout.gsm8k.load_data", load_data)
    for spec in ("openai/gsm8k", "openai/gsm8k:socratic"):
        assert load(spec, "test").examples[0].answer == "1"
    assert asked == [("openai/gsm8k:main", "test"), ("openai/gsm8k:socratic", "test")]


def test_the_reward_reports_the_strict_score_beside_the_flexible_one():
    texts = ["#### 18", "18", "no idea", "#### 19"]
    samples = [Sample(prompt="p", text=text, answer="18", token_ids=(), finish_reason="stop", example_id=str(i),
                      fields={}) for i, text in enumerate(texts)]
    scores = score_samples(load_reward("rollout.gsm8k:reward"), samples)
    assert [found.value for found in scores] == [1.0, 1.0, 0.0, 0.0]
    assert [found.parts["strict"] for found in scores] == [1.0, 0.0, 0.0, 0.0]
    assert [found.parts["parsed"] for found in scores] == [1.0, 1.0, 0.0, 1.0]
    assert reward([]) == []
