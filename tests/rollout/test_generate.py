"""The generation command: what it samples, writes, prints and refuses."""

import io
import json
import os
import sys

import numpy as np
import pytest
import tokenizers
import torch
from tiny_models import tiny_model
from tokenizers import decoders, models, pre_tokenizers

from engine import Capacity, Engine, Request, Sampling
from models.checkpoint import save_model
from models.cli import run_cli
from models.tokenizer import load_tokenizer
from rollout import generate
from rollout.data import uid
from rollout.generate import choose_capacity, main
from rollout.samples import print_rows, write_rows
from rollout.structure import read_checked

WORDS = ["<|end|>", "<|turn|>", *"abcdefghijklmnopqrstuvwxyz", " "]  # ids 0..28
CHAT = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}{% endfor %}<|turn|>"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model folder without a tokenizer; its config declares no eos id."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    save_model(tiny_model(dtype=torch.float32, eos_ids=()), folder)
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    """A folder of the test's own, with a tokenizer of characters and a chat template."""
    place = tmp_path / "model"
    place.mkdir()
    for file in plain.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(WORDS[:2])
    backend.save(str(place / "tokenizer.json"))
    (place / "chat_template.jinja").write_text(CHAT)
    return place


def call(capsys, folder, *arguments, status=0):
    """The samples on stdout, and what stands on stderr."""
    assert main(["--model", str(folder), *map(str, arguments)]) == status
    found = capsys.readouterr()
    return [json.loads(line) for line in found.out.splitlines()], found.err


TOKENS = ("--prompt-tokens", "1,2;3,4,5", "--max-new-tokens", 6, "--schedule", "exit:gate=0.5", "--seed", 5)


def test_samples_are_those_of_the_engine_and_keep_every_bit(plain, tmp_path, capsys):
    rows, errors = call(capsys, plain, *TOKENS, "--samples", 2, "--temperature", 0.8, "--log-dir", tmp_path / "log")
    log = read_checked(tmp_path / "log" / "schedule.log")
    requests = [Request(ids, 6, uid(0, "tokens", str(group), sample))
                for group, ids in enumerate([(1, 2), (3, 4, 5)]) for sample in (0, 1)]
    capacity = choose_capacity(requests, 3, {})
    wanted = Engine(tiny_model(dtype=torch.float32, eos_ids=()), "exit:gate=0.5", capacity).generate(
        requests, Sampling(seed=5, temperature=0.8))
    for row, logged, completion in zip(rows, log.completions, wanted.completions, strict=True):
        assert tuple(row["token_ids"]) == logged.token_ids == completion.token_ids
        bits = np.array(row["logprobs"], np.float32).view(np.uint32)
        assert (bits == np.array(completion.logprobs, np.float32).view(np.uint32)).all()
        assert tuple(row["exit_depths"]) == logged.exit_depths and row["finish_reason"] == "length"
    assert [(r["id"], r["sample"], r["prompt_ids"]) for r in rows] == [
        ("0", 0, [1, 2]), ("0", 1, [1, 2]), ("1", 0, [3, 4, 5]), ("1", 1, [3, 4, 5])]
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    assert rows[0]["prompt"] is None and rows[0]["text"] is None and rows[0]["stop_id"] is None
    lines = (tmp_path / "log" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert "4/4" in errors and "24 tokens in" in errors


def test_out_takes_the_place_of_stdout(plain, tmp_path, capsys):
    wanted, _ = call(capsys, plain, *TOKENS)
    rows, _ = call(capsys, plain, *TOKENS, "--out", tmp_path / "out.jsonl")
    assert rows == [] and [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == wanted


def test_a_seed_gives_its_own_samples(plain, capsys):
    one, again, other = (call(capsys, plain, *TOKENS, "--seed", seed)[0] for seed in (1, 1, 2))
    assert one == again and [r["token_ids"] for r in one] != [r["token_ids"] for r in other]


def test_temperature_0_is_greedy_with_log_probs_at_temperature_1(plain, capsys):
    rows, errors = call(capsys, plain, *TOKENS, "--temperature", 0, "--samples", 2)
    assert "greedy (log-probs at temperature 1)" in errors
    assert rows[0]["token_ids"] == rows[1]["token_ids"] and max(rows[0]["logprobs"]) < 0
    sampled, _ = call(capsys, plain, "--prompt-tokens", "1,2", "--max-new-tokens", 1, "--schedule", "exit:gate=0.5",
                      "--temperature", 1, "--samples", 60)
    same = [r["logprobs"][0] for r in sampled if r["token_ids"][0] == rows[0]["token_ids"][0]]
    assert same and np.allclose(same, rows[0]["logprobs"][0], rtol=0, atol=1e-5)


def test_out_that_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    """`--out /dev/null` as root put a regular file in the place of the device."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_rows([{"id": "1"}], pipe)
    assert os.read(reader, 100) == b'{"id": "1"}\n' and pipe.is_fifo()
    os.close(reader)
    link.symlink_to("real.jsonl")
    write_rows([{"id": "2"}], link)
    assert link.is_symlink() and (tmp_path / "real.jsonl").read_text() == '{"id": "2"}\n'
    assert len(list(tmp_path.iterdir())) == 3


def test_text_goes_in_and_comes_out(folder, capsys):
    rows, _ = call(capsys, folder, "--prompt", "ab", "cab a", "--max-new-tokens", 8)
    assert [r["prompt_ids"] for r in rows] == [[2, 3], [4, 2, 3, 28, 2]] and rows[1]["prompt"] == "cab a"
    for row in rows:
        assert row["text"] == "".join(WORDS[i] for i in row["token_ids"] if i > 1)


def test_a_stop_text_cuts_what_is_shown_and_keeps_the_token_that_completes_it(folder, capsys):
    text = call(capsys, folder, "--prompt", "ab", "--max-new-tokens", 20)[0][0]["text"]
    stop = text[5:7]
    [row], _ = call(capsys, folder, "--prompt", "ab", "--max-new-tokens", 20, "--stop", stop)
    end = text.index(stop)
    assert row["finish_reason"] == "stop_string" and row["text"] == text[:end]
    assert len(row["token_ids"]) == len(row["logprobs"]) == end + 2


def test_every_declared_stop_id_ends_a_sample(folder, capsys):
    """config.json, generation_config.json, tokenizer_config.json and the caller each name another one."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [10, 11]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|turn|>"}))
    rows, errors = call(capsys, folder, "--prompt", "ab", "--samples", 40, "--max-new-tokens", 30, "--stop-id", 12, 13)
    assert "stop ids [1, 9, 10, 11, 12, 13]" in errors
    fired = {row["stop_id"] for row in rows if row["finish_reason"] == "stop"}
    assert len(fired) >= 4 and fired <= {1, 9, 10, 11, 12, 13}
    assert all(row["token_ids"][-1] == row["stop_id"] for row in rows if row["finish_reason"] == "stop")
    (folder / "tokenizer.json").unlink()  # without a tokenizer the other three still count
    _, errors = call(capsys, folder, "--prompt-tokens", "1", "--max-new-tokens", 2, "--stop-id", 12)
    assert "stop ids [9, 10, 11, 12]" in errors


def test_hidden_sampling_defaults_are_named_and_not_applied(folder, capsys):
    """A checkpoint's repetition penalty changed every rollout of a run, and nobody had asked for it."""
    arguments = ("--prompt", "ab", "--max-new-tokens", 12, "--samples", 2)
    wanted, errors = call(capsys, folder, *arguments)
    assert "note:" not in errors and "no top-k, no top-p, no penalties" in errors
    (folder / "generation_config.json").write_text(json.dumps(
        {"repetition_penalty": 1.05, "top_k": 50, "bos_token_id": 1, "transformers_version": "4"}))
    rows, errors = call(capsys, folder, *arguments)
    assert rows == wanted
    assert "note: generation_config.json sets repetition_penalty = 1.05, top_k = 50 - not applied" in errors


def test_only_what_differs_from_the_effective_sampling_is_noted(folder, capsys):
    """Asked for by hand, the folder's own values are applied and no note says otherwise."""
    (folder / "generation_config.json").write_text(json.dumps(
        {"repetition_penalty": 1.0, "do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9}))
    arguments = ("--prompt", "ab", "--max-new-tokens", 12)
    _, errors = call(capsys, folder, *arguments)
    assert "note: generation_config.json sets temperature = 0.7, top_k = 3, top_p = 0.9 - not applied" in errors
    _, errors = call(capsys, folder, *arguments, "--temperature", 0.7, "--top-k", 3, "--top-p", 0.9)
    assert "note:" not in errors and "temperature 0.7, top-k 3, top-p 0.9 (log-probs of the full softmax)" in errors


def test_top_k_and_top_p_reach_sampler_and_log(plain, tmp_path, capsys):
    """top-k 1 takes the most likely token whatever the seed, with its log-prob under the full softmax."""
    greedy, _ = call(capsys, plain, *TOKENS, "--temperature", 0)
    rows, _ = call(capsys, plain, *TOKENS, "--top-k", 1, "--log-dir", tmp_path / "k")
    tiny, _ = call(capsys, plain, *TOKENS, "--top-p", 1e-9, "--log-dir", tmp_path / "p")
    for found in (rows, tiny):
        assert [r["token_ids"] for r in found] == [r["token_ids"] for r in greedy]
        assert [r["logprobs"] for r in found] == [r["logprobs"] for r in greedy]
    headers = [read_checked(tmp_path / name / "schedule.log").header for name in ("k", "p")]
    assert [(h["top_k"], h["top_p"]) for h in headers] == [(1, 1.0), (0, 1e-9)]
    for option, value, named in (("--top-k", -1, "top_k = -1"), ("--top-p", 0, "top_p = 0.0")):
        with pytest.raises(ValueError, match=named):
            call(capsys, plain, *TOKENS, option, value)
    with pytest.raises(ValueError, match="leave them out"):
        call(capsys, plain, *TOKENS, "--temperature", 0, "--top-k", 5)


def test_prompts_of_a_file_are_texts_or_messages(folder, tmp_path, capsys):
    file = tmp_path / "some.jsonl"
    messages = [{"role": "user", "content": "ab"}]
    file.write_text(json.dumps({"prompt": "ab", "id": "x"}) + "\n" + json.dumps({"prompt": messages, "id": "y"}) + "\n")
    rows, _ = call(capsys, folder, "--prompts", file, "--max-new-tokens", 3)
    templated = load_tokenizer(folder).encode("<|turn|>user ab<|turn|>")
    assert [(r["id"], r["prompt"], r["prompt_ids"]) for r in rows] == [("x", "ab", [2, 3]), ("y", messages, templated)]
    rows, _ = call(capsys, folder, "--prompts", file, "--max-new-tokens", 3, "--chat")
    assert [r["prompt_ids"] for r in rows] == [templated, templated] and rows[0]["prompt"] == "ab"


def test_dtype_profile_and_capacity_reach_the_log(plain, tmp_path, capsys):
    call(capsys, plain, *TOKENS, "--dtype", "bfloat16", "--profile", "fused", "--max-rows", 9, "--max-span", 2,
         "--log-dir", tmp_path)
    header = read_checked(tmp_path / "schedule.log").header
    assert (header["dtype"], header["profile"], header["capacity"]["max_rows"]) == ("bfloat16", "fused", 9)
    assert header["schedule"] == "exit:gate=0.5,min=1,max=3"


def test_sizes_follow_from_the_requests():
    """40 requests of at most 5 + 12 - 1 = 16 positions that run: one page a loop; 17 positions take two."""
    requests = [Request((1,) * (1 + i % 5), 12, uid=i) for i in range(40)]
    found = choose_capacity(requests, 2, {})
    assert (found.max_sequences, found.pages, found.max_rows) == (32, 32 * 2 * 1, 256)
    longer = [*requests, Request((1,) * 6, 12, uid=99)]
    assert choose_capacity(longer, 2, {}).pages == 32 * 2 * 2
    assert choose_capacity(requests[:3], 2, {}).max_sequences == 3
    assert choose_capacity(requests, 2, {"max_sequences": 300}).max_rows == 1500
    assert choose_capacity(requests, 2, {"max_sequences": 300, "max_span": 1}).max_rows == 300
    assert choose_capacity([Request((1,) * 90, 12, uid=1)] * 33, 2, {}).max_rows == 32 * 64
    assert choose_capacity([Request((1,) * 90, 12, uid=1)] * 33, 2, {"max_sequences": 33}).max_rows == 2048
    assert choose_capacity(requests, 2, {"pages": 7, "page_size": 4}) == Capacity(pages=7, page_size=4)


REFUSALS = {
    "no tokenizer": (["--prompt", "a"], r"tokenizer\.json: not found"),
    "stop text without one": (["--prompt-tokens", "1", "--stop", "a"], r"tokenizer\.json: not found"),
    "token that is none": (["--prompt-tokens", "1,x"], "'1,x' is not a list of token ids"),
    "no token": (["--prompt-tokens", "1;"], "'' is not a list of token ids"),
    "too long": (["--prompt-tokens", "1,2", "--max-new-tokens", "63"],
                 "prompt '0': 2 tokens [+] 63 new ones exceed the model's 64 positions"),
    "schedule": (["--prompt-tokens", "1", "--schedule", "exit:4"], "depth '4' must be a loop from 1 to 3"),
    "temperature": (["--prompt-tokens", "1", "--temperature", "-1"], "temperature = -1.0 must be"),
    "samples": (["--prompt-tokens", "1", "--samples", "0"], "--samples 0"),
    "folder of --out": (["--prompt-tokens", "1", "--out", "none/x.jsonl"], "its folder does not exist"),
    "chat of tokens": (["--prompt-tokens", "1", "--chat"], "--chat needs text"),
    "capacity": (["--prompt-tokens", "1", "--max-rows", "0"], "max_rows = 0 must be"),
    "device": (["--prompt-tokens", "1", "--device", "tpu"], "device = 'tpu' is not supported"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_refused_before_weights_are_read(plain, monkeypatch, name):
    arguments, message = REFUSALS[name]

    def never(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(generate, "load_model", never)
    with pytest.raises(ValueError, match=message):
        main(["--model", str(plain), "--max-new-tokens", "4", *arguments])


def test_what_only_the_engine_knows_is_refused_too(plain, folder):
    for arguments, message in ((["--prompt-tokens", "29"], "token id 29 is no integer within"),
                               (["--prompt-tokens", "1", "--stop-id", "29"], "stop_ids holds 29, outside"),
                               (["--prompt-tokens", "1", "--pages", "1"], "need .* pages")):
        with pytest.raises(ValueError, match=message):
            main(["--model", str(plain), "--max-new-tokens", "20", *arguments])
    with pytest.raises(ValueError, match="prompt '1' is empty"):
        main(["--model", str(folder), "--prompt", "a", ""])
    with pytest.raises(ValueError, match="cannot encode 'A'"):
        main(["--model", str(folder), "--prompt", "A"])
    with pytest.raises(ValueError, match=r"none\.jsonl': no such file"):
        main(["--model", str(folder), "--prompts", "none.jsonl"])


def test_an_error_is_one_line_and_status_2(plain, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_cli(lambda: main(["--model", str(plain / "none"), "--prompt", "a"]))
    found = capsys.readouterr()
    assert stopped.value.code == 2 and found.out == "" and found.err.count("\n") == 1
    assert found.err.startswith("error: model = ")


def test_lines_are_json_whatever_the_encoding(tmp_path, monkeypatch):
    """Characters beyond the terminal's encoding, and a lone surrogate that UTF-8 cannot carry."""
    rows = [{"text": "é 😀"}, {"text": "\ud800"}]
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    print_rows(rows)
    stdout.flush()
    assert [json.loads(line) for line in stdout.buffer.getvalue().decode("ascii").splitlines()] == rows
    write_rows(rows, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows and "😀" in lines[0]
