"""The embedded task: steps taken from real answers, made-up problems, format, reward, tokenizer."""

import json
from collections import Counter
from pathlib import Path

import pytest

from models.tokenizer import load_tokenizer
from rollout.calculator import (
    Step,
    answer_text,
    build_tokenizer,
    extract,
    main,
    parse,
    problems,
    prompt_text,
    reward,
)
from rollout.rewards import Sample

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"
RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def write(file, *answers):
    file.write_text("".join(json.dumps({"question": "q", "answer": answer}) + "\n" for answer in answers))
    return file


def test_steps_are_those_with_two_small_integers_and_an_exact_small_result(tmp_path):
    train = write(tmp_path / "a.jsonl", "<<48+27=75>>75 and < <1+1=2>> and 2*3=6 and << 9 - 4 = 5 >>5",
                  "<<1000-1=999>> <<999+1=1000>> <<12/60=0.2>> <<0.5*2=1>> <<1+2+3=6>> <<3-5=-2>> <<2+2=5>> <<7/2=3>>",
                  "<<5/0=0>> <<120/4=30>> <<48+27=75>> <<-3+5=2>> <<3*40=120>> <<007+1=8>> <<12=12>>",
                  "<<0*1000=0>> <<-3+5=8>>")
    assert extract(train, train) == ([Step(48, "+", 27, 75), Step(9, "-", 4, 5), Step(120, "/", 4, 30),
                                      Step(3, "*", 40, 120), Step(7, "+", 1, 8)], [])


def test_held_out_are_distinct_steps_that_only_the_test_file_has(tmp_path):
    train = write(tmp_path / "a.jsonl", "<<1+1=2>> <<2+3=5>>")
    test = write(tmp_path / "b.jsonl", "<<2+3=5>> <<3+2=5>>", "<<9-1=8>> <<3+2=5>>")
    assert extract(train, test)[1] == [Step(3, "+", 2, 5), Step(9, "-", 1, 8)]


def test_a_file_that_is_not_gsm8k_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"a\.jsonl' not found"):
        extract(file, file)
    file.write_text('{"answer": 3}\n')
    with pytest.raises(ValueError, match=r"line 1: has no text 'answer'"):
        extract(file, file)


def test_the_command_writes_what_the_embedded_files_hold_of_these_problems(tmp_path, capsys):
    """The first problems of the train file give the first lines of the embedded one."""
    assert main(["--train", str(GSM8K / "train.jsonl"), "--test", str(GSM8K / "test.jsonl"),
                 "--out", str(tmp_path / "new")]) == 0
    made = {split: (tmp_path / "new" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
    embedded = Path(__file__).parents[2] / "rollout" / "embedded" / "calculator" / "train.jsonl"
    assert made["train"] == embedded.read_text().splitlines()[:len(made["train"])]
    assert made["train"][0] == '{"id": "48/2", "prompt": "48/2=", "answer": "24"}'
    assert (len(made["train"]), len(made["test"])) == (78, 45)
    assert not set(made["train"]) & set(made["test"])
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["test.jsonl", "train.jsonl"]
    assert f"{len(made['test'])} steps" in capsys.readouterr().out


def test_text_of_prompt_and_answer():
    assert (prompt_text(48, "+", 27), answer_text(75)) == ("\n48+27=", "57\n")
    assert (answer_text(30), answer_text(0), answer_text(100)) == ("03\n", "0\n", "001\n")


@pytest.mark.parametrize(("text", "number"), [
    ("57\n", 75), ("57", 75), ("03\n", 30), ("0\n", 0), ("999\n", 999), ("57\n1+1=2\n", 75),
    ("", None), ("\n", None), ("1234\n", None), ("12+\n", None), (" 57\n", None), ("57 \n", None), ("-5\n", None),
    ("5.\n", None), ("٣\n", None), ("=57\n", None), ("\n57\n", None)])
def test_parse_reads_reversed_digits_up_to_the_end(text, number):
    assert parse(text) == number


def test_parse_inverts_answer_text_for_every_result():
    assert [parse(answer_text(c)) for c in range(1000)] == list(range(1000))


@pytest.mark.parametrize(("text", "finish", "value", "parsed"), [
    ("57\n", "stop", 1.0, 1.0), ("57", "stop", 1.0, 1.0), ("75", "stop", 0.0, 1.0), ("x", "stop", 0.0, 0.0),
    ("57", "length", 0.0, 0.0), ("57\n", "length", 1.0, 1.0)])
def test_reward_is_for_the_right_number_that_was_ended(text, finish, value, parsed):
    """A response cut at its length limit was not ended by the model: 57 may have been about to become 571."""
    sample = Sample(prompt="48+27=", text=text, answer="75", token_ids=(), finish_reason=finish, example_id="48+27",
                    fields={})
    assert reward([sample, sample]) == [{"reward": value, "parsed": parsed}] * 2


def test_made_up_problems_are_exact_and_in_range():
    made = problems(3000, seed=1)
    assert len(made) == 3000
    for a, op, b, c in made:
        assert 0 <= a <= 999 and 0 <= b <= 999 and 0 <= c <= 999
        assert RESULT[op](a, b) == c and (op != "/" or c * b == a)


def test_made_up_problems_have_the_documented_shares():
    """Seeded, so no chance is involved; the bounds are several standard deviations of 6,000 draws."""
    made = problems(6000, seed=0)
    for op, share in (("+", 0.35), ("-", 0.30), ("*", 0.22), ("/", 0.13)):
        assert abs(sum(step.op == op for step in made) / 6000 - share) < 0.02
    sums = [operand for step in made if step.op == "-" for operand in (step.a, step.b)]
    lengths = Counter(len(str(operand)) for operand in sums)
    for digits, share in ((1, 0.2), (2, 0.5), (3, 0.3)):
        assert abs(lengths[digits] / len(sums) - share) < 0.04
    longer = [operand for operand in sums if operand > 9]
    assert abs(sum(operand % 10 == 0 for operand in longer) / len(longer) - (0.25 + 0.05 + 0.65 / 10)) < 0.03
    assert abs(sum(operand % 10 == 5 for operand in longer) / len(longer) - (0.05 + 0.65 / 10)) < 0.03
    quotients = [step for step in made if step.op == "/"]
    assert sum(2 <= step.b <= 9 for step in quotients) / len(quotients) > 0.6


def test_a_problem_depends_on_seed_and_number_only():
    made = problems(50, seed=7)
    assert made == problems(20, seed=7) + problems(30, seed=7, start=20)
    assert made != problems(50, seed=8)
    # Golden: a checkpoint's command makes its data again from the seed.
    assert made[:3] == [Step(26, "+", 784, 810), Step(540, "+", 16, 556), Step(899, "-", 28, 871)]


def test_excluded_problems_do_not_occur_and_leave_the_others_alone():
    made = problems(400, seed=3)
    exclude = set(made[::2])
    others = problems(400, seed=3, exclude=exclude)
    assert not exclude & set(others)
    assert all(new == old for new, old in zip(others, made, strict=True) if old not in exclude)


def test_the_tokenizer_has_16_symbols_and_the_newline_begins_and_ends_a_text(tmp_path):
    build_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.encode(prompt_text(48, "+", 27) + answer_text(75)) == [0, 5, 9, 11, 3, 8, 15, 6, 8, 0]
    assert tokenizer.encode("0123456789+-*/=") == list(range(1, 16))
    assert tokenizer.decode([6, 8, 0]) == "57"
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.special["bos_token"]) == (16, (0,), "\n")
    for other in ("4x", "4 8", "٣"):
        with pytest.raises(ValueError, match="cannot encode"):
            tokenizer.encode(other)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
