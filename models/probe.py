"""`python -m models.probe MODEL [--tokens 1,2,3 | --text TEXT | --data FILE]`: a look into a model.

Prints sizes and, over a text, what each loop knows: entropy, how often its most likely token is
already that of the last loop, and where the exit gate would leave. `--out` writes the tensors of
one text: `hidden` [T, S, H] in the model's dtype, and in float32 (float64 for a float64 model)
`logits` [T, S, V], `gate` [T, S] after the sigmoid, `exit_pdf` [S, T]; `--plot` draws the table.
Without a text only the headers of the weight files are read.

Shape letters: T loops, S tokens of one text, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from models.checkpoint import check_tensors, load_model, read_config
from models.cli import run_cli
from models.config import ModelConfig
from models.dense import dense_forward, pack
from models.exits import exit_cdf, exit_distribution, exit_loop, exit_probability
from models.files import check_output, check_picture, is_special, replacing
from models.logprob import entropy
from models.looped import LoopedLM
from models.numerics import DTYPES, configure, dtype_of, wide
from models.probe_plot import plot
from models.rounding import PROFILES

THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
LOGITS_AT_ONCE = 1 << 24  # elements of the largest logits tensor, unless --out keeps them all


@dataclass(frozen=True)
class Text:
    """One text to run: `where` it stands, for errors, and its token ids."""

    where: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class LoopTotals:
    """Sums over the tokens of some texts.

    Attributes:
        tokens: how many.
        entropy: float64 [T] of next-token entropies in nats.
        agreeing: int64 [T], tokens whose most likely next token is that of loop T.
        exits: float64 [T] of the exit distribution.
        depths: float64 [len(THRESHOLDS)] of exit loops, 1..T.
    """

    tokens: int
    entropy: Tensor
    agreeing: Tensor
    exits: Tensor
    depths: Tensor

    def __add__(self, other: LoopTotals) -> LoopTotals:
        return LoopTotals(self.tokens + other.tokens, self.entropy + other.entropy, self.agreeing + other.agreeing,
                          self.exits + other.exits, self.depths + other.depths)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text. Whatever can be refused is, before weights are read."""
    options = _parser().parse_args(argv)
    device = configure(device=options.device)
    config = read_config(options.model)
    dtype = dtype_of(options.dtype)
    check_tensors(options.model, config)
    texts = _texts(options, config)
    out = _check_out(options.out, texts, options.data)
    picture = _check_plot(options.plot, texts)
    print("\n".join(facts(config, dtype, options)))
    if not texts:
        return 0
    model = load_model(options.model, dtype=options.dtype, device=device, profile=options.profile)
    totals = None
    for text in texts:
        kept: dict[str, Tensor] | None = {} if out else None
        found = measure(model, text.ids, kept)
        totals = found if totals is None else totals + found
    print("\n".join(table(totals, len(texts))))
    if picture:
        shares = (value / totals.tokens for value in (totals.entropy, totals.agreeing, totals.exits))
        plot(picture, f"{options.model}: {heading(totals, len(texts))}", *(share.tolist() for share in shares))
        print(f"wrote {picture}")
    if out:
        _write(kept, out)
        print(f"wrote {out}: " + ", ".join(f"{name} {list(value.shape)}" for name, value in kept.items()))
    return 0


def measure(model: LoopedLM, ids: Sequence[int], kept: dict[str, Tensor] | None = None) -> LoopTotals:
    """Run one text densely through all loops; logits only ever for a few rows at a time.

    kept: filled with the tensors that `--out` writes, on the CPU; then the logits exist whole.
    """
    config, loops, size = model.config, model.config.loops, len(ids)
    with torch.no_grad():
        states = dense_forward(model, pack([ids], model), loops)
        gates = torch.stack([model.gate(h) for h in states])
        pdf = exit_distribution(gates, wide(model.dtype))
        logits = None if kept is None else torch.empty(loops, size, config.vocab, dtype=wide(model.dtype))
        bits, best = torch.zeros(loops, dtype=torch.float64), torch.empty(loops, size, dtype=torch.int64)
        step = max(1, LOGITS_AT_ONCE // config.vocab)
        for loop, h in enumerate(states):
            for start in range(0, size, step):
                some = model.readout(h[start:start + step])
                bits[loop] += entropy(some).double().sum().cpu()
                best[loop, start:start + step] = some.argmax(-1).cpu()
                if logits is not None:
                    logits[loop, start:start + step] = some.cpu()
        cdf = exit_cdf(pdf)
        depths = torch.stack([exit_loop(cdf, threshold).double().sum() for threshold in THRESHOLDS])
        if kept is not None:
            kept |= {"hidden": torch.stack(states).cpu(), "logits": logits,
                     "gate": exit_probability(gates, gates.dtype).cpu(), "exit_pdf": pdf.cpu()}
    return LoopTotals(size, bits, (best == best[-1]).sum(-1), pdf.double().sum(0).cpu(), depths.cpu())


def facts(config: ModelConfig, dtype: torch.dtype, options: argparse.Namespace) -> list[str]:
    """Sizes of the model, one line each."""
    sizes = {name: math.prod(shape) for name, shape in config.weight_shapes().items()}
    parameters, width = sum(sizes.values()), dtype.itemsize
    per_loop = sum(size for name, size in sizes.items() if name.startswith("core.") or name == "norm")
    kv = config.kv_bytes(width)
    rows = [
        ("model", f"{options.model} ({config.family})"),
        ("parameters", f"{parameters:,}"),
        ("loops", f"{config.loops} of {config.layers} layers, shipped exit threshold {config.exit_threshold:g}"),
        ("widths", f"hidden {config.hidden}, intermediate {config.intermediate}, {config.heads} heads of "
                   f"{config.head_dim} over {config.kv_heads} kv heads"),
        ("vocabulary", f"{config.vocab:,}" + (", head tied to the embedding" if config.tied else "")),
        ("positions", f"{config.max_positions:,}"),
        ("dtype", f"{options.dtype}, rounding profile {options.profile}"),
        ("weights", f"{parameters * width:,} bytes, of which each loop reads {per_loop * width:,}"),
        ("KV cache", f"{kv:,} bytes a token and loop, {kv * config.loops:,} a token at all loops"),
    ]
    return [f"{name:<11}{value}" for name, value in rows]


def heading(totals: LoopTotals, texts: int) -> str:
    """How much was run."""
    return f"{texts} text{'s' * (texts != 1)}, {totals.tokens:,} tokens"


def table(totals: LoopTotals, texts: int) -> list[str]:
    """What each loop knows, and where the gate would leave."""
    loops, tokens = len(totals.entropy), totals.tokens
    lines = ["", heading(totals, texts), "",
             f"loop  entropy (nats)  top-1 as at loop {loops}  exit probability"]
    for loop in range(loops):
        lines.append(f"{loop + 1:>4}  {totals.entropy[loop] / tokens:>14.4f}  "
                     f"{100 * totals.agreeing[loop] / tokens:>{16 + len(str(loops))}.2f} %  "
                     f"{totals.exits[loop] / tokens:>14.4f}")
    depths = ", ".join(f"{depth / tokens:.3f} at {threshold:g}"
                       for threshold, depth in zip(THRESHOLDS, totals.depths.tolist(), strict=True))
    return [*lines, "", f"mean exit depth by threshold: {depths}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.probe", description="Sizes of a looped model and, over a "
                                     "text, what each loop knows and where the exit gate would leave.")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--tokens", help="token ids, separated by commas")
    source.add_argument("--text", help="a text, for the folder's tokenizer.json")
    source.add_argument("--data", metavar="FILE", help="JSONL with `text` or `prompt` (a text or chat messages) in "
                        "each row, or any other file as plain text, one text a line")
    parser.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--profile", default="hf", choices=PROFILES, help="rounding profile (default hf)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--out", metavar="FILE.safetensors", help="write hidden, logits, gate and exit_pdf of the text")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table: .png, .svg or .pdf")
    return parser


def _texts(options: argparse.Namespace, config: ModelConfig) -> list[Text]:
    """The texts asked for, every one of them fit for the model."""
    if options.tokens is not None:
        texts = [Text("--tokens", _token_ids(options.tokens))]
    elif options.text is not None or options.data is not None:
        from models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(options.model)
        rows = [("--text", options.text)] if options.data is None else _rows(Path(options.data))
        texts = [Text(where, tuple(tokenizer.encode(row if isinstance(row, str) else tokenizer.chat(row))))
                 for where, row in rows]
    else:
        return []
    for text in texts:
        if not text.ids:
            raise ValueError(f"{text.where}: holds no tokens")
        wrong = [token for token in text.ids if not 0 <= token < config.vocab]
        if wrong:
            raise ValueError(f"{text.where}: token id {wrong[0]} is outside the vocabulary, 0..{config.vocab - 1}")
        if len(text.ids) > config.max_positions:
            raise ValueError(f"{text.where}: {len(text.ids)} tokens are more than max_positions = "
                             f"{config.max_positions} of the model; shorten the text")
    return texts


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"--tokens {text!r}: must be integers separated by commas") from None


def _rows(file: Path) -> list[tuple[str, str | list]]:
    """The texts (or chat messages) of a file, blank lines left out, with the line of each."""
    if not file.is_file():
        raise ValueError(f"--data {str(file)!r}: no such file")
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {str(file)!r}: not UTF-8 text: {error}") from None
    rows = [(f"{file} line {number}", line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"--data {str(file)!r}: holds no text")
    return [(where, _json_text(where, line)) for where, line in rows] if file.suffix == ".jsonl" else rows


def _json_text(where: str, line: str) -> str | list:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object: {error}") from None
    found = row.get("text", row.get("prompt")) if isinstance(row, dict) else None
    if not isinstance(found, str | list):
        raise ValueError(f"{where}: needs a text under `text`, or a text or chat messages under `prompt`")
    return found


def _check_out(out: str | None, texts: list[Text], data: str | None) -> Path | None:
    if out is None:
        return None
    if data is not None or not texts:
        raise ValueError(f"--out {out!r}: writes the tensors of one text; give it by --tokens or --text")
    return check_output(out, "--out")


def _check_plot(wanted: str | None, texts: list[Text]) -> Path | None:
    if wanted is not None and not texts:
        raise ValueError(f"--plot {wanted!r}: draws what each loop knows over a text; give one by --tokens, --text or "
                         "--data")
    return None if wanted is None else check_picture(wanted, "--plot")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        if is_special(path):
            path.write_bytes(save(tensors))
            return
        with replacing(path) as partial:
            save_file(tensors, partial)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"--out {str(path)!r}: cannot be written: {error}") from None


if __name__ == "__main__":
    run_cli(main)
