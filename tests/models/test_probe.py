"""The probe command: facts by hand, tensors against the golden set, refusals in one line."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tiny_models import GOLDEN, tiny_model

from models import probe
from models.checkpoint import SINGLE, load_model, save_model
from models.probe_plot import plot

MODEL = str(GOLDEN / "ouro-tiny-a")


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "ouro-tiny-a" / "golden.safetensors")


@pytest.fixture
def spelling(tmp_path):
    """The golden model with a tokenizer: letters a.. are ids 3.., and a chat template."""
    folder = tmp_path / "spelling"
    shutil.copytree(MODEL, folder)
    words = ["<|end|>", "<|user|>", "<|x|>", *"abcdefghijklmnopqrstuvwxyz "]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.add_special_tokens(words[:3])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    return str(folder)


def ids_of(golden, n):
    return ",".join(map(str, golden[f"p{n}.input_ids"].tolist()))


def printed(capsys, *argv):
    assert probe.main(argv) == 0
    return capsys.readouterr().out


def rows(text):
    """entropy, agreement and exit probability of each loop, as printed."""
    return [[float(x) for x in m.groups()] for m in
            re.finditer(r"^ +\d+ +([\d.]+) +([\d.]+) % +([\d.]+)$", text, re.MULTILINE)]


def test_facts_by_hand(capsys):
    """Two layers of 4 x 64 x 64 + 3 x 160 x 64 + 4 x 64, a norm, and twice 256 x 64 and the gate's 65."""
    found = printed(capsys, MODEL)
    core = 2 * (4 * 64 * 64 + 3 * 160 * 64 + 4 * 64) + 64
    assert f"{core + 2 * 256 * 64 + 65:,}\n" in found
    assert f"each loop reads {core * 4:,}\n" in found
    assert "1,024 bytes a token and loop, 4,096 a token at all loops" in found  # 2 x 2 layers x 4 heads x 16 x 4
    assert "4 of 2 layers" in found and "loop  entropy" not in found
    half = printed(capsys, MODEL, "--dtype", "bfloat16")
    assert f"each loop reads {core * 2:,}\n" in half and "512 bytes a token and loop" in half


@pytest.mark.parametrize("n", [1, 7, 33])
def test_out_holds_the_golden_tensors(golden, tmp_path, capsys, n):
    out = tmp_path / "p.safetensors"
    printed(capsys, MODEL, "--tokens", ids_of(golden, n), "--out", str(out))
    found = load_file(out)
    assert sorted(found) == ["exit_pdf", "gate", "hidden", "logits"]
    for name, value in found.items():
        expected = golden[f"p{n}.{name}"]
        assert value.dtype == torch.float32 and value.shape == expected.shape
        assert (value - expected).abs().max() <= 5e-5, name
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.parametrize("dtype, hidden, rest", [
    ("bfloat16", torch.bfloat16, torch.float32), ("float64", torch.float64, torch.float64)])
def test_out_in_another_dtype(golden, tmp_path, capsys, dtype, hidden, rest):
    out = tmp_path / "p.safetensors"
    printed(capsys, MODEL, "--tokens", ids_of(golden, 7), "--dtype", dtype, "--out", str(out))
    found = load_file(out)
    assert found["hidden"].dtype == hidden
    assert {found[name].dtype for name in ("logits", "gate", "exit_pdf")} == {rest}
    atol = 0.184 if dtype == "bfloat16" else 5e-5
    assert (found["logits"] - golden["p7.logits"]).abs().max() < atol


def test_the_table_against_the_golden_logits(golden, capsys):
    text = printed(capsys, MODEL, "--tokens", ids_of(golden, 33))
    logp = golden["p33.logits"].double().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).mean(-1)
    top = golden["p33.logits"].argmax(-1)
    agree = (top == top[-1]).double().mean(-1) * 100
    pdf = golden["p33.exit_pdf"].double().mean(0)
    assert len(rows(text)) == 4
    for loop, (bits, share, exits) in enumerate(rows(text)):
        assert bits == pytest.approx(entropy[loop].item(), abs=1e-3)
        assert share == pytest.approx(agree[loop].item(), abs=0.01)
        assert exits == pytest.approx(pdf[loop].item(), abs=1e-3)
    depth = (golden["p33.exit_step_thr0.5"] + 1).double().mean().item()
    assert f"{depth:.3f} at 0.5" in text and "4.000 at 1\n" in text


@pytest.mark.parametrize("at_once", [1, 256 * 5])
def test_chunks_of_logits_change_nothing_that_is_printed(golden, tmp_path, monkeypatch, capsys, at_once):
    """A long text never has its logits whole; --out still gets every row."""
    argv = [MODEL, "--tokens", ids_of(golden, 33), "--out", str(tmp_path / "p.safetensors")]
    whole = rows(printed(capsys, *argv))
    logits = load_file(argv[-1])["logits"]
    shapes, readout = [], probe.LoopedLM.readout
    monkeypatch.setattr(probe.LoopedLM, "readout", lambda self, h: shapes.append(len(h)) or readout(self, h))
    monkeypatch.setattr(probe, "LOGITS_AT_ONCE", at_once)
    for found, expected in zip(rows(printed(capsys, *argv)), whole, strict=True):
        assert found == pytest.approx(expected, abs=2e-4)
    assert max(shapes) == max(1, at_once // 256) and sum(shapes) == 4 * 33
    assert torch.allclose(load_file(argv[-1])["logits"], logits, atol=1e-5)


def test_a_text_goes_through_the_folders_tokenizer(spelling, capsys):
    assert rows(printed(capsys, spelling, "--text", "abz")) == rows(printed(capsys, MODEL, "--tokens", "3,4,28"))


def test_data_averages_over_the_tokens_of_all_lines(spelling, tmp_path, capsys):
    """Weighted by tokens, not by lines: each line alone, summed by hand."""
    lines = ["abc", "hello there", "z"]
    plain, jsonl = tmp_path / "t.txt", tmp_path / "t.jsonl"
    plain.write_text("\n".join([lines[0], "", lines[1] + "\r", lines[2], ""]), encoding="utf-8")
    jsonl.write_text("\n".join(json.dumps(r) for r in (
        {"text": lines[0], "prompt": "not this"}, {"prompt": lines[1]}, {"prompt": lines[2], "answer": "1"})))
    found = printed(capsys, spelling, "--data", str(plain))
    assert "3 texts, 15 tokens" in found
    assert rows(printed(capsys, spelling, "--data", str(jsonl))) == rows(found)
    alone = [rows(printed(capsys, spelling, "--text", line)) for line in lines]
    for loop in range(4):
        for column, atol in ((0, 1e-4), (1, 0.01), (2, 1e-4)):
            mean = sum(len(line) * a[loop][column] for line, a in zip(lines, alone, strict=True)) / 15
            assert rows(found)[loop][column] == pytest.approx(mean, abs=atol)


def test_chat_messages_go_through_the_template(spelling, tmp_path, capsys):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "ab"}]}))
    assert rows(printed(capsys, spelling, "--data", str(file))) == rows(printed(capsys, MODEL, "--tokens", "1,3,4"))


def test_facts_alone_read_no_weights(monkeypatch, capsys):
    monkeypatch.setattr(probe, "load_model", None)
    assert "parameters" in printed(capsys, MODEL)


@pytest.mark.parametrize("argv, message", [
    (["--tokens", "3,256"], r"--tokens: token id 256 is outside the vocabulary, 0\.\.255"),
    (["--tokens=-1,3"], r"--tokens: token id -1 is outside"),
    (["--tokens", ""], r"--tokens: holds no tokens"),
    (["--tokens", "1,x"], r"--tokens '1,x': must be integers"),
    (["--tokens", ",".join(["3"] * 2049)], r"--tokens: 2049 tokens are more than max_positions = 2048"),
    (["--text", "hi"], r"tokenizer\.json: not found"),
    (["--dtype", "float16"], r"float16 is not supported"),
    (["--device", "tpu"], r"device = 'tpu' is not supported"),
    (["--out", "x.safetensors"], r"--out 'x\.safetensors': writes the tensors of one text"),
    (["--tokens", "3", "--out", "no/such/folder/x"], r"must name a file in a folder that exists"),
    (["--tokens", "3", "--out", "."], r"must name a file in a folder that exists"),
    (["--plot", "x.png"], r"--plot 'x\.png': draws what each loop knows over a text"),
    (["--tokens", "3", "--plot", "no/such/folder/x.png"], r"--plot .*must name a file in a folder that exists"),
    (["--tokens", "3", "--plot", "x.jpeg"], r"--plot 'x\.jpeg': the format '\.jpeg' is not supported; end it in \.png"),
])
def test_bad_requests_are_refused_before_weights_are_read(monkeypatch, argv, message):
    monkeypatch.setattr(probe, "load_model", None)
    with pytest.raises(ValueError, match=message):
        probe.main([MODEL, *argv])


@pytest.mark.parametrize("name, content, message", [
    ("t.jsonl", b'{"text": "ab"}\n{"answer": 1}', r"t\.jsonl line 2: needs a text under `text`"),
    ("t.jsonl", b'{"text": "ab"}\n\n[1]', r"t\.jsonl line 3: needs a text"),
    ("t.jsonl", b'{"text": "ab"}\n{', r"t\.jsonl line 2: not a JSON object"),
    ("t.jsonl", b'{"text": ""}', r"t\.jsonl line 1: holds no tokens"),
    ("t.txt", b"\n \n", r"t\.txt': holds no text"), ("t.txt", b"", r"t\.txt': holds no text"),
    ("t.txt", b"\xff\xfe", r"t\.txt': not UTF-8"),
])
def test_bad_data_is_refused_by_line(spelling, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        probe.main([spelling, "--data", str(tmp_path / name)])


def test_other_bad_inputs(spelling, tmp_path):
    with pytest.raises(ValueError, match=r"model = '.*nowhere' is not a folder"):
        probe.main([str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match=r"--data '.*none\.txt': no such file"):
        probe.main([spelling, "--data", str(tmp_path / "none.txt")])
    (tmp_path / "t.txt").write_text("ab")
    with pytest.raises(ValueError, match="tensors of one text"):
        probe.main([spelling, "--data", str(tmp_path / "t.txt"), "--out", str(tmp_path / "o")])
    small = tiny_model(dtype=torch.float32)
    save_model(small, tmp_path / "broken")
    (tmp_path / "broken" / SINGLE).write_bytes(b"")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        probe.main([str(tmp_path / "broken")])


def test_two_sources_are_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        probe.main([MODEL, "--tokens", "3", "--text", "a"])
    assert stopped.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, capsys):
    out = tmp_path / "p.safetensors"
    out.write_bytes(b"old")

    def broken(tensors, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(probe, "save_file", broken)
    with pytest.raises(ValueError, match="cannot be written: disk full"):
        probe.main([MODEL, "--tokens", "3", "--out", str(out)])
    assert out.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_plot_draws_the_numbers_of_the_table(golden, tmp_path, monkeypatch, capsys):
    """Three panels, one labelled bar a loop; the text stays what it is without."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **kw: figures.append(self) or save(self, *a, **kw))
    argv = [MODEL, "--tokens", ids_of(golden, 33)]
    plain = printed(capsys, *argv)
    out = tmp_path / "p.png"
    found = printed(capsys, *argv, "--plot", str(out))
    assert found == plain + f"wrote {out}\n"
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and [p.name for p in tmp_path.iterdir()] == ["p.png"]
    [figure] = figures
    assert figure.texts[0].get_text() == f"{MODEL}: 1 text, 33 tokens" and len(figure.axes) == 3
    for column, (axis, scale, digits) in enumerate(zip(figure.axes, (1, 1, 100), (2, 1, 1), strict=True)):
        heights = [bar.get_height() for bar in axis.patches]
        wanted = [row[column] * scale for row in rows(plain)]
        assert heights == pytest.approx(wanted, abs=0.01)
        assert [float(text.get_text()) for text in axis.texts] == [round(h, digits) for h in heights]


def test_many_loops_are_drawn_without_labels(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kind: (figures.append(self), path.touch()))
    plot(tmp_path / "p.svg", "many", [0.0] * 40, [0.5] * 40, [0.025] * 40)
    assert [len(axis.patches) for axis in figures[0].axes] == [40] * 3
    assert not any(axis.texts for axis in figures[0].axes)


def test_devices_are_written_to_and_stay_devices(golden, tmp_path, capsys):
    """`--out /dev/null` as root put a regular file in the place of the device."""
    for option, name in (("--out", "tensors"), ("--plot", "picture")):
        pipe, whole = tmp_path / f"{name}-pipe", tmp_path / name
        os.mkfifo(pipe)
        found = []
        reader = threading.Thread(target=lambda pipe=pipe, found=found: found.append(pipe.read_bytes()),
                                  daemon=True)  # nobody writes to a pipe that was replaced
        reader.start()
        printed(capsys, MODEL, "--tokens", ids_of(golden, 7), option, str(pipe))
        reader.join(timeout=20)
        assert pipe.is_fifo()
        printed(capsys, MODEL, "--tokens", ids_of(golden, 7), option, str(whole))
        assert found == [whole.read_bytes()]


def test_as_a_command_an_error_is_one_line_and_status_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "models.probe", str(tmp_path / "nowhere")], capture_output=True,
                          text=True, cwd=GOLDEN.parents[2])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: model = ") and done.stderr.count("\n") == 1


def test_measure_is_the_models_own_forward(golden):
    """Totals of a text the library way, without the command."""
    model = load_model(MODEL)
    totals = probe.measure(model, golden["p7.input_ids"].tolist())
    assert totals.tokens == 7 and totals.agreeing[-1] == 7
    assert totals.exits.sum().item() == pytest.approx(7, abs=1e-5)
    assert totals.depths[-1] == 7 * 4
