"""Data sets: what is read, what is refused and how the row is named, orders and uids."""

import hashlib
import json
import sys
import types

import pytest

from rollout.data import Example, fit_prompts, load_data, make_data, order, uid
from rollout.sources import read_jsonl


def write(folder, *lines, name="train.jsonl"):
    file = folder / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
                    encoding="utf-8")
    return file


def test_rows_become_examples_and_other_columns_become_fields(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}]
    file = write(tmp_path, {"prompt": "1+1=", "answer": "2", "id": 7, "level": "easy"}, "", "  ",
                 {"prompt": chat, "answer": 4, "id": "b"})
    data = load_data(file)
    assert data.name == "train"
    assert data.examples == (Example(id="7", prompt="1+1=", answer="2", fields={"level": "easy"}),
                             Example(id="b", prompt=chat, answer="4", fields={}))


def test_ids_default_to_row_numbers_and_blank_lines_do_not_count(tmp_path):
    file = write(tmp_path, {"prompt": "a", "answer": "1"}, "", {"prompt": "b", "answer": "2"})
    assert [example.id for example in load_data(file).examples] == ["0", "1"]


def test_field_names_limit_and_name_are_the_callers(tmp_path):
    file = write(tmp_path, *({"q": f"q{i}", "a": i, "key": f"k{i}", "id": 0} for i in range(3)))
    data = load_data(file, prompt_field="q", answer_field="a", id_field="key", limit=2, name="mine")
    assert data.name == "mine"
    assert [(e.id, e.prompt, e.answer, e.fields) for e in data.examples] == [
        ("k0", "q0", "0", {"id": 0}), ("k1", "q1", "1", {"id": 0})]
    assert load_data(file, prompt_field="q", answer_field=None, id_field="key").examples[2].answer == ""


def test_a_folder_is_read_by_split(tmp_path):
    write(tmp_path, {"prompt": "a", "answer": "1"}, name="train.jsonl")
    write(tmp_path, {"prompt": "b", "answer": "1"}, name="test.jsonl")
    data = load_data(tmp_path, split="test")
    assert (data.name, data.examples[0].prompt) == ("test", "b")
    with pytest.raises(ValueError, match=r"holds neither dev\.jsonl nor dev\.parquet"):
        load_data(tmp_path, split="dev")


@pytest.mark.parametrize(("line", "complaint"), [
    ("{", "line 2: not a JSON object"),
    ('{"prompt": "a"} {"prompt": "b"}', "line 2: not a JSON object"),
    pytest.param("[" * 100_000, "line 2: not a JSON object: maximum recursion", id="too deep"),
    ("[1]", "line 2: expected a JSON object, found list"),
    ('{"prompt": "a", "answer": NaN}', "line 2: not a JSON object: NaN is not JSON"),
    ('{"prompt": "a", "prompt": "b", "answer": "1"}', "line 2: not a JSON object: key 'prompt' occurs twice"),
    ({"question": "a", "answer": "1"}, r"line 2: has no field 'prompt', only 'question', 'answer'.*prompt_field"),
    ({"prompt": "a"}, "line 2: has no field 'answer'.*answer_field"),
    ({"prompt": "", "answer": "1"}, "line 2: prompt = ''"),
    ({"prompt": [], "answer": "1"}, "line 2: prompt = "),
    ({"prompt": [{"role": "user"}], "answer": "1"}, "line 2: prompt = "),
    ({"prompt": "a", "answer": None}, "line 2: answer = 'None'"),
    ({"prompt": "a", "answer": True}, "line 2: answer = 'True'"),
    ('{"prompt": "a", "answer": 1e999}', "line 2: answer = 'inf'"),
])
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, line, complaint):
    file = write(tmp_path, {"prompt": "good", "answer": "1"}, line)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_data(file)
    assert str(file) in str(caught.value)


def test_bytes_that_are_no_text_are_an_error_with_the_line(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"prompt": "a"}\r\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        read_jsonl(file)


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path):
    """U+2028 may stand in a JSON text; str.splitlines would cut the line there."""
    file = tmp_path / "train.jsonl"
    file.write_bytes('{"prompt": "a\u2028b"}\r\n'.encode())
    assert read_jsonl(file) == [(f"{file} line 1", {"prompt": "a\u2028b"})]


def test_an_id_that_occurs_twice_names_both_rows(tmp_path):
    file = write(tmp_path, {"prompt": "a", "answer": "1", "id": 1}, {"prompt": "b", "answer": "1", "id": 2}, "",
                 {"prompt": "c", "answer": "1", "id": "1"})
    with pytest.raises(ValueError, match=r"id '1' occurs twice: .*line 1 and .*line 4"):
        load_data(file)


@pytest.mark.parametrize("row", [{"prompt": "b", "answer": "1"}, {"prompt": "b", "answer": "1", "id": None},
                                 {"prompt": "b", "answer": "1", "id": ""}])
def test_ids_for_some_rows_only_are_refused(tmp_path, row):
    file = write(tmp_path, {"prompt": "a", "answer": "1", "id": 1}, row)
    with pytest.raises(ValueError, match="line 2: "):
        load_data(file)


def test_an_id_field_that_was_asked_for_must_exist(tmp_path):
    with pytest.raises(ValueError, match=r"has no field 'key'.*id_field"):
        load_data(write(tmp_path, {"prompt": "a", "answer": "1"}), id_field="key")


def test_an_empty_file_a_wrong_suffix_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no rows"):
        load_data(write(tmp_path, "", "  "))
    with pytest.raises(ValueError, match=r"suffix '\.txt'"):
        load_data(write(tmp_path, "{}", name="train.txt"))
    for missing in ("missing.jsonl", "/missing/folder", "./missing"):
        with pytest.raises(ValueError, match=r"no such file or folder \(looked at /"):
            load_data(missing)
    with pytest.raises(ValueError, match="limit = 0"):
        load_data(write(tmp_path, {"prompt": "a", "answer": "1"}), limit=0)


def test_the_digest_follows_content_and_order_only(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    one, two = load_data(write(tmp_path, *rows, name="x.jsonl")), load_data(write(tmp_path, *rows, "", name="y.jsonl"))
    assert one.digest == two.digest and one.name != two.name
    others = [rows[::-1], rows[:1], [rows[0], {**rows[1], "answer": "3"}], [rows[0], {**rows[1], "extra": 1}]]
    digests = {load_data(write(tmp_path, *other, name="z.jsonl")).digest for other in others}
    assert len(digests | {one.digest}) == 5


def test_a_field_that_has_no_plain_form_is_refused_by_type():
    with pytest.raises(ValueError, match="row 0: a field holds a object"):
        make_data("d", [Example("0", "a", "1", {"x": object()})])


def test_parquet_rows_are_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "test.parquet"
    datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"], "n": [3, 4]}).to_parquet(str(file))
    data = load_data(tmp_path, split="test")
    assert data.name == "test"
    assert data.examples == (Example("0", "a", "1", {"n": 3}), Example("1", "b", "2", {"n": 4}))
    file.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"test\.parquet: not readable as parquet"):
        load_data(file)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets` that knows one set and records what it is asked for."""
    asked = []

    def load_dataset(path, name=None, *, split):
        asked.append((path, name, split))
        if path != "owner/set":
            raise ConnectionError("Couldn't reach the hub\nsecond line")
        return [{"prompt": "a", "answer": "1"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_hub_name_is_loaded_with_configuration_and_split(hub):
    data = load_data("owner/set:main", split="validation")
    assert (data.name, data.examples[0].prompt) == ("owner/set:main/validation", "a")
    load_data("owner/set")
    assert hub == [("owner/set", "main", "validation"), ("owner/set", None, "train")]


def test_a_hub_name_without_a_network_says_all_that_was_tried(hub):
    with pytest.raises(ValueError, match=r"tried the path .*/owner/other .*hub data set 'owner/other'.*split 'train'"
                                         r".*ConnectionError: Couldn't reach the hub") as caught:
        load_data("owner/other")
    assert "second line" not in str(caught.value)


def test_a_hub_name_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets"):
        load_data("owner/set")


@pytest.fixture
def three():
    return make_data("d", [Example(str(i), "x" * length, "", {}) for i, length in enumerate((2, 5, 3))])


def encode(example):
    return [ord(letter) for letter in example.prompt]


def test_prompts_of_exactly_the_limit_fit_and_longer_ones_are_named(three):
    fitting, skipped = fit_prompts(three, encode, 5)
    assert ([example.id for example, _ in fitting], skipped) == (["0", "1", "2"], 0)
    assert fitting[2][1] == [120, 120, 120]
    with pytest.raises(ValueError, match="prompt of example '1' has 5 tokens, more than 4"):
        fit_prompts(three, encode, 4)


def test_skipped_prompts_are_counted_never_cut(three):
    fitting, skipped = fit_prompts(three, encode, 4, policy="skip")
    assert ([(example.id, len(ids)) for example, ids in fitting], skipped) == ([("0", 2), ("2", 3)], 1)
    with pytest.raises(ValueError, match=r"every one of 3 prompts is longer than 1 tokens \(the shortest has 2\)"):
        fit_prompts(three, encode, 1, policy="skip")


def test_an_unknown_policy_and_a_prompt_without_tokens_are_refused(three):
    with pytest.raises(ValueError, match="'truncate'; choose 'error' or 'skip'"):
        fit_prompts(three, encode, 5, policy="truncate")
    with pytest.raises(ValueError, match="example '0' encodes to no tokens"):
        fit_prompts(three, lambda example: [], 5)


def test_order_is_a_permutation_that_only_seed_and_epoch_decide():
    orders = {(seed, epoch): order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    for found in orders.values():
        assert sorted(found) == list(range(50))
    assert len({tuple(found) for found in orders.values()}) == 6
    assert orders[1, 2] == order(50, 1, 2)
    assert order(0, 0, 0) == []
    assert order(6, 3, 1) == [5, 1, 0, 3, 4, 2]  # golden: a resumed run of a later release must agree


def test_uid_is_the_documented_hash():
    """blake2b of 8 bytes over length-prefixed parts, written out here a second time."""
    parts = [b"uid", b"12", b"gsm8k", b"7", b"3"]
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    wanted = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    assert uid(12, "gsm8k", "7", 3) == wanted == 9206499182780626632


def test_uids_of_two_sets_whose_ids_both_start_at_0_never_collide():
    """Keys are (step, set, id, sample). Joined without lengths, ("a", "11") and ("a1", "1") would be one key."""
    keys = [(step, name, str(example), sample) for step in (0, 1, 11) for name in ("a", "b", "a1", "a11")
            for example in (0, 1, 11, 111) for sample in (0, 1, 11)]
    assert len({uid(*key) for key in keys}) == len(keys)
