"""`python -m rollout.generate --model DIR --prompt TEXT ...`: sample from a looped model.

One JSON object a sample on stdout, or in --out: id, sample, prompt, prompt_ids, text, token_ids
(the response), logprobs, exit_depths, finish_reason, stop_id. Log-probs are written so that
reading them as float32 gives the sampled bits. What decides the result is printed on stderr.

Of the folder's generation_config.json only the stop ids are applied; a note names what else it
sets. Temperature 0 takes the most likely token; log-probs are then those at temperature 1. With
--top-k or --top-p log-probs are still those of the full softmax, and the log is for evaluation
only: training from it is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from engine.engine import Completion, Engine, Request, Rollout
from engine.plan import Capacity
from engine.sampler import Sampling
from engine.schedule import GRAMMAR, Schedule, parse_schedule
from models.checkpoint import load_model, read_config
from models.cli import run_cli
from models.config import ModelConfig
from models.invariance import MODES, set_numerics
from models.linear import KINDS
from models.numerics import DTYPES, configure, dtype_of
from models.rounding import PROFILES
from models.tokenizer import Tokenizer, load_tokenizer, stop_ids
from rollout.collect import LOG_FILE, SAMPLES_FILE
from rollout.log import from_rollout, write_log
from rollout.prompts import Prompt, prompts_of_file, prompts_of_texts, prompts_of_tokens, requests_of
from rollout.samples import check_outputs, print_rows, sample_rows, write_rows
from rollout.statistics import statistics

# Of generation_config.json: what changes no sampled token.
HARMLESS = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config",
            "use_cache")
# Left out on the command line, these follow from the requests.
DERIVED_SIZES = ("max_sequences", "max_rows", "pages")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text. Whatever can be refused is, before weights are read."""
    options = _parser().parse_args(argv)
    device = configure(threads=options.threads, device=options.device)
    _check_counts(options)
    check_outputs(options.out, options.log_dir)
    config = read_config(options.model)
    schedule = parse_schedule(options.schedule, config.loops)
    tokenizer = _tokenizer(options)
    prompts = _prompts(options, tokenizer)
    _check_lengths(prompts, options, config)
    settings = generation_config(options.model)
    sampling = _sampling(options, config, tokenizer, settings)
    requests = requests_of(prompts, options.samples, options.max_new_tokens)
    given = {field.name: getattr(options, field.name) for field in fields(Capacity)}
    capacity = choose_capacity(requests, schedule.max_depth,
                               {name: value for name, value in given.items() if value is not None})
    announce(options, config, schedule, capacity, sampling)
    note_ignored(settings, sampling)
    model = load_model(options.model, dtype=options.dtype, device=device, profile=options.profile,
                       linear=options.linear)
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    print(set_numerics(model, options.numerics, length=longest), file=sys.stderr)
    engine = Engine(model, schedule.text, capacity, decode=tokenizer.decode if tokenizer else None)
    rollout = run(engine, requests, sampling)
    report(options, rollout, sample_rows(prompts, rollout.completions, tokenizer, sampling.stop_strings))
    return 0


def choose_capacity(requests: Sequence[Request], depth: int, given: dict[str, int]) -> Capacity:
    """The capacity for `requests` at most `depth` loops deep; `given` fields are as they are.

    Left out, max_sequences is at most the number of requests, pages are enough for that many of
    the longest request at the deepest loop, and max_rows lets all prompts take their spans in one
    pass (up to 2,048 rows): sequences that start together stay at the same loop, which attends in
    one call.
    """
    found = dict(given)
    found.setdefault("max_sequences", min(Capacity.max_sequences, len(requests)))
    span = min(found.get("max_span", Capacity.max_span), max(len(r.prompt) for r in requests))
    together = min(found["max_sequences"] * span, 2048)
    found.setdefault("max_rows", max(Capacity.max_rows, found["max_sequences"], together))
    capacity = Capacity(**found)
    if "pages" in given:
        return capacity
    # The last new token is never run.
    longest = max(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
    return replace(capacity, pages=capacity.max_sequences * capacity.sequence_pages(longest, depth))


def announce(options: argparse.Namespace, config: ModelConfig, schedule: Schedule, capacity: Capacity,
             sampling: Sampling) -> None:
    """Say on stderr what decides the result."""
    kept = capacity.pages * capacity.page_size * config.kv_bytes(dtype_of(options.dtype).itemsize)
    print(f"sampling: {sampling.describe()}, at most {options.max_new_tokens} new tokens",
          f"schedule: {schedule.text}, {options.dtype}, profile {options.profile}, device {options.device}, "
          f"threads {options.threads}",
          f"capacity: {capacity.max_sequences} sequences, {capacity.max_rows} rows a pass, {capacity.max_span} "
          f"a span, {capacity.pages} pages of {capacity.page_size} positions ({kept / 2**20:.1f} MiB)",
          sep="\n", file=sys.stderr)


def note_ignored(settings: dict, sampling: Sampling) -> None:
    """Name on stderr what generation_config.json sets and the effective sampling does not."""
    applied = {"temperature": sampling.temperature, "do_sample": not sampling.greedy, "top_k": sampling.top_k,
               "top_p": sampling.top_p, "repetition_penalty": 1.0}
    ignored = {name: value for name, value in settings.items()
               if name not in HARMLESS and not (name in applied and value == applied[name])}
    if ignored:
        print("note: generation_config.json sets", ", ".join(f"{k} = {v!r}" for k, v in ignored.items()),
              "- not applied: only this command's options are", file=sys.stderr)


def run(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> Rollout:
    """Run the engine, with a progress bar over samples on stderr."""
    from tqdm import tqdm

    tokens = 0
    with tqdm(total=len(requests), unit="sample", file=sys.stderr) as bar:
        def on_finish(completion: Completion) -> None:
            nonlocal tokens
            tokens += len(completion.token_ids)
            bar.set_postfix(tokens=tokens, refresh=False)
            bar.update()

        return engine.generate(requests, sampling, on_finish)


def report(options: argparse.Namespace, rollout: Rollout, rows: Sequence[dict]) -> None:
    """Write what the command line asks for, and one line of counts on stderr."""
    if options.log_dir is not None:
        folder = Path(options.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_log(from_rollout(rollout), folder / LOG_FILE)
        write_rows(rows, folder / SAMPLES_FILE)
    if options.out is not None:
        write_rows(rows, options.out)
    else:
        print_rows(rows)
    found = statistics(rollout)
    print(f"{found.tokens} tokens in {found.passes} passes: {found.passes_per_token:.2f} passes a token, "
          f"{found.rows_per_pass:.1f} rows a pass, mean depth {found.mean_depth:.2f}, {found.rows} of "
          f"dense's {found.dense_cells} cells", file=sys.stderr)


def _check_counts(options: argparse.Namespace) -> None:
    if options.samples < 1 or options.max_new_tokens < 1:
        raise ValueError(f"--samples {options.samples}, --max-new-tokens {options.max_new_tokens}: each must "
                         "be at least 1")


def _tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """The folder's tokenizer; None where there is none and token ids are all that is asked for."""
    needed = options.prompt_tokens is None or options.stop
    if needed or (Path(options.model) / "tokenizer.json").is_file():
        return load_tokenizer(options.model)
    return None


def _prompts(options: argparse.Namespace, tokenizer: Tokenizer | None) -> list[Prompt]:
    if options.prompt_tokens is not None:
        if options.chat:
            raise ValueError("--chat needs text: use --prompt or --prompts, not --prompt-tokens")
        return prompts_of_tokens(options.prompt_tokens)
    if options.prompts is not None:
        return prompts_of_file(options.prompts, tokenizer, options.chat)
    return prompts_of_texts(options.prompt, tokenizer, options.chat)


def _check_lengths(prompts: Sequence[Prompt], options: argparse.Namespace, config: ModelConfig) -> None:
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length + options.max_new_tokens > config.max_positions:
            raise ValueError(f"prompt {prompt.id!r}: {length} tokens + {options.max_new_tokens} new ones exceed "
                             f"the model's {config.max_positions} positions; shorten it or lower --max-new-tokens")


def generation_config(folder: str) -> dict:
    """generation_config.json of a model folder, {} without one. ValueError when it cannot be read."""
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def _sampling(options: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None,
              settings: dict) -> Sampling:
    if tokenizer is not None:
        ends = stop_ids(config.eos_ids, tokenizer, options.stop_id)
    else:
        declared = settings.get("eos_token_id")
        declared = declared if isinstance(declared, list) else [] if declared is None else [declared]
        ends = tuple(sorted({*config.eos_ids, *declared, *options.stop_id}))
    greedy = options.temperature == 0
    return Sampling(seed=options.seed, temperature=1.0 if greedy else options.temperature, greedy=greedy,
                    top_k=options.top_k, top_p=options.top_p, stop_ids=ends, stop_strings=tuple(options.stop))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rollout.generate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder with config.json and model.safetensors")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT")
    given.add_argument("--prompts", metavar="FILE", help="JSONL or parquet with `prompt`: text or chat messages")
    given.add_argument("--prompt-tokens", metavar="IDS", help='token ids, as in "1,2;3,4,5"')
    add("--chat", action="store_true", help="put texts into the checkpoint's chat template as user messages")
    add("--schedule", default="dense", help=f"{GRAMMAR}; default dense")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    add("--temperature", type=float, default=1.0, metavar="X", help="0: the most likely token; default 1")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K most likely tokens; default 0: all")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="sample among the most likely tokens that reach P together; default 1: all")
    add("--seed", type=int, default=0, help="key of all random numbers; default 0")
    add("--samples", type=int, default=1, metavar="K", help="samples a prompt; default 1")
    add("--stop", nargs="+", action="extend", default=[], metavar="TEXT",
        help="texts that end a sample; the shown text is cut before them")
    add("--stop-id", nargs="+", action="extend", type=int, default=[], metavar="ID",
        help="ids that end a sample, beside those that the folder declares")
    add("--dtype", choices=list(DTYPES), default="float32")
    add("--profile", choices=PROFILES, default=PROFILES[0], help="where intermediates are rounded")
    add("--numerics", choices=MODES, default=MODES[0], help="how bits repeat (docs/numerics.md); default shapes")
    add("--linear", choices=(*KINDS, "auto"), default=KINDS[0], help="linear operator; default native")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=1, help="CPU threads; bits may depend on it; default 1")
    add("--out", metavar="FILE", help="write the samples here instead of stdout")
    add("--log-dir", metavar="DIR", help=f"write {LOG_FILE} and {SAMPLES_FILE} here")
    sizes = parser.add_argument_group("capacity of the engine (it decides shapes, so bits)")
    for field in fields(Capacity):
        default = "follows from the requests" if field.name in DERIVED_SIZES else f"default {field.default}"
        sizes.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N", help=default)
    return parser


if __name__ == "__main__":
    run_cli(main)
