"""Every cast of this project against integer arithmetic on the bit patterns, in numpy.

A bfloat16 is the upper half of a float32, so widening shifts and narrowing rounds the lower half
away: to the nearest, on a tie to the even pattern, upwards into infinity, with subnormals like
any other number. Of NaN only that it stays NaN is promised: its payload and sign differ from one
kernel of torch to the next (0x7fc0 or 0xffff on one and the same CPU).
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from bfloat16_bits import EVERY, PATTERNS, bfloat16_of, bits_of, float32_of, is_nan16, is_nan32, narrowed, widened
from safetensors.torch import save_file
from schedule_logs import rollout_log
from tiny_models import tiny_config, tiny_model

from engine.sampler import Sampling, sample
from models.checkpoint import SINGLE, load_model, save_model
from models.ouro import new_source, parse, tensor_names
from rollout.log import decode, encode
from rollout.samples import write_rows
from train.masters import Masters
from train.replay import recorded

HIDDEN, VOCAB = 16, len(EVERY) // 16


def assert_narrowed(found, bits):
    """found: bfloat16 tensor, cast from the float32 `bits`."""
    found, nan = bits_of(found), is_nan32(bits)
    wrong = np.flatnonzero(np.where(nan, ~is_nan16(found), found != narrowed(bits)))
    assert not len(wrong), f"{bits[wrong[0]]:#010x} became {found[wrong[0]]:#06x}, {len(wrong)} in all"


def assert_widened(found, halves):
    """found: float32 tensor, cast from the bfloat16 `halves`."""
    found, nan = bits_of(found), is_nan16(halves)
    wrong = np.flatnonzero(np.where(nan, ~is_nan32(found), found != widened(halves)))
    assert not len(wrong), f"{halves[wrong[0]]:#06x} became {found[wrong[0]]:#010x}, {len(wrong)} in all"


def test_the_reference_by_hand():
    """1 is 3f80; the ties beside 1 and 3f81 go to the even neighbour; the largest numbers become infinite."""
    cases = {0x3F800000: 0x3F80, 0x3F808000: 0x3F80, 0x3F808001: 0x3F81, 0x3F818000: 0x3F82, 0x3F817FFF: 0x3F81,
             0x7F7F7FFF: 0x7F7F, 0x7F7F8000: 0x7F80, 0xFF7FFFFF: 0xFF80, 0x00000001: 0x0000, 0x00008000: 0x0000,
             0x00008001: 0x0001, 0x00018000: 0x0002, 0x80000001: 0x8000, 0x807F8000: 0x8080, 0x7F800000: 0x7F80}
    assert narrowed(np.array(list(cases), dtype=np.uint32)).tolist() == list(cases.values())


# Contiguous rows take the vector loop, the others the scalar one, which is another code.
LAYOUTS = {
    "whole": lambda x: x, "one off": lambda x: torch.cat([x[:1], x])[1:],
    "every other": lambda x: x.repeat_interleave(2)[::2],
    "columns": lambda x: x.view(-1, 16).T.contiguous().T, "by threes": lambda x: x,
}


def cast(x, dtype, layout):
    x = LAYOUTS[layout](x)
    if layout == "by threes":  # too short for a vector: nothing but the tail of the loop
        return torch.cat([part.to(dtype) for part in x[:3 * 4000].split(3)] + [x[3 * 4000:].to(dtype)])
    return x.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_under_all_casts(layout):
    assert_narrowed(cast(float32_of(EVERY), torch.bfloat16, layout), EVERY)
    halves = bfloat16_of(PATTERNS)
    assert_widened(cast(halves, torch.float32, layout), PATTERNS)
    back = bits_of(cast(cast(halves, torch.float32, layout), torch.bfloat16, layout))
    assert (is_nan16(back) == is_nan16(PATTERNS)).all()
    assert (back == PATTERNS)[~is_nan16(PATTERNS)].all()


def test_random_numbers_of_all_magnitudes():
    bits = np.random.default_rng(0).integers(2**32, size=2**20, dtype=np.uint32)
    assert_narrowed(float32_of(bits).to(torch.bfloat16), bits)


# ---- weights: load, save, publish, masters ----


def patterned(dtype, values):
    """A model of `dtype` whose embedding holds `values`."""
    config = parse(new_source(hidden=HIDDEN, intermediate=24, layers=1, heads=2, vocab=VOCAB, loops=2))
    sizes = {name: getattr(config, name) for name in (
        "hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "loops")}
    model = tiny_model(dtype=dtype, source=config.source, **sizes)
    model.weights["embed"].copy_(values.view(VOCAB, HIDDEN))
    return model


@pytest.fixture(scope="module")
def float_folder(tmp_path_factory):
    """A float32 folder with every bit pattern at a tie and around it."""
    folder = tmp_path_factory.mktemp("models") / "float32"
    save_model(patterned(torch.float32, float32_of(EVERY)), folder)
    return folder


def test_weights_loaded_in_bfloat16(float_folder):
    assert_narrowed(load_model(float_folder, dtype="bfloat16").weights["embed"], EVERY)


def test_weights_keep_every_bit_in_their_own_type(float_folder, tmp_path):
    """NaN with its payload too: there is no cast."""
    assert (bits_of(load_model(float_folder).weights["embed"]) == EVERY).all()
    halves = np.resize(PATTERNS, len(EVERY))
    save_model(patterned(torch.bfloat16, bfloat16_of(halves)), tmp_path / "bf16")
    assert (bits_of(load_model(tmp_path / "bf16", dtype="bfloat16").weights["embed"]) == halves).all()


def test_bfloat16_folder_as_float32_masters_and_back(tmp_path):
    """What training starts from and publishes before its first step: the folder's own numbers."""
    halves = np.resize(PATTERNS, len(EVERY))
    model = patterned(torch.bfloat16, bfloat16_of(halves))
    save_model(model, tmp_path / "m")
    masters = Masters(load_model(tmp_path / "m").weights)
    assert_widened(masters.tensors()["embed"], halves)
    model.weights["embed"].zero_()
    model.publish(masters.tensors(), 1)
    same = bits_of(model.weights["embed"]) == halves
    assert same[~is_nan16(halves)].all()


def test_a_publication_casts_masters_once_and_wide_copies_are_of_the_compute_copy():
    """The float32 head and gate of a bfloat16 model hold the rounded weights, not the masters."""
    model = patterned(torch.bfloat16, torch.zeros(len(EVERY), dtype=torch.bfloat16))
    wanted = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in model.weights.items()}
    wanted["embed"] = float32_of(EVERY).view(VOCAB, HIDDEN)
    wanted["head"] = float32_of(EVERY[::-1].copy()).view(VOCAB, HIDDEN)
    wanted["exit_gate.weight"] = float32_of(EVERY[3::24576]).view(1, HIDDEN)
    masters = Masters(wanted)
    model.publish(masters.tensors(), 1)
    for name in ("embed", "head", "exit_gate.weight"):
        assert_narrowed(model.weights[name], bits_of(wanted[name]))
    for name in ("head", "exit_gate.weight"):
        assert model.wide[name].dtype == torch.float32
        assert_widened(model.wide[name], bits_of(model.weights[name]))


def test_a_gradient_in_bfloat16_reaches_the_float32_sum_unchanged():
    model = patterned(torch.bfloat16, torch.zeros(len(EVERY), dtype=torch.bfloat16))
    masters = Masters({name: w.float() for name, w in model.weights.items()})
    total = torch.zeros_like(masters.flat)
    masters.collect_into(total)
    halves = np.resize(PATTERNS, len(EVERY))
    masters.differentiable(model)["embed"].backward(bfloat16_of(halves).view(VOCAB, HIDDEN))
    found = bits_of(masters.layout.views(total)["embed"])
    keep = ~is_nan16(halves) & (halves != 0x8000)  # 0 + -0 is +0
    assert (found == widened(halves))[keep].all()


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_folders_in_other_types(stored, tmp_path):
    """float16 is a subset of float32. float64 goes to bfloat16 by way of float32, so a number just above
    a tie of bfloat16 that rounds onto it in float32 ends at the even side: 1 + 2^-8 + 2^-40 becomes 1."""
    config = tiny_config()
    names = tensor_names(config)
    model = tiny_model(dtype=torch.float32)
    rows = config.vocab * config.hidden
    values = np.random.default_rng(1).integers(2**16, size=rows, dtype=np.uint16).view(np.float16)
    if stored == torch.float64:
        generator = np.random.default_rng(2)
        values = generator.standard_normal(rows) * 2.0 ** generator.integers(-150, 130, rows)
        values[0] = 1 + 2.0**-8 + 2.0**-40
    values[np.isnan(values)] = 0
    weights = {name: w.to(stored) for name, w in model.weights.items()}
    weights["embed"] = torch.from_numpy(values).view(config.vocab, config.hidden)
    save_model(model, tmp_path / "m")
    save_file({names[name]: w.contiguous() for name, w in weights.items()}, tmp_path / "m" / SINGLE)
    with np.errstate(over="ignore", under="ignore"):
        wide = values.astype(np.float32).view(np.uint32)
    assert (bits_of(load_model(tmp_path / "m").weights["embed"]) == wide).all()
    half = load_model(tmp_path / "m", dtype="bfloat16").weights["embed"]
    assert_narrowed(half, wide)
    assert stored == torch.float16 or half.view(-1)[0] == 1.0


# ---- log-probs: float64 to float32, and float32 through files ----


def between():
    """(float64 values, float32 bits): midpoints of neighbouring float32 numbers of all magnitudes and of both
    signs, subnormal too, go to the even one; the next float64 on either side goes to its own side."""
    generator = np.random.default_rng(4)
    low = generator.integers(0x7F7FFFFF, size=50_000, dtype=np.uint32)  # below infinity
    low[:6] = 0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFE, 0x3F7FFFFF
    ends = [(low + up).astype(np.uint32).view(np.float32).astype(np.float64) for up in (0, 1)]
    middle = (ends[0] + ends[1]) / 2  # exact: 25 bits
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    bits = np.concatenate([low + low % 2, low, low + 1])
    return np.concatenate([values, -values]), np.concatenate([bits, bits | 0x80000000])


def test_float64_to_float32_of_tensors_lists_and_arrays():
    """A float64 model's log-probs, advantages, and Python floats on their way into logs and tensors."""
    values, bits = between()
    assert (bits_of(torch.from_numpy(values).to(torch.float32)) == bits).all()
    assert (bits_of(torch.tensor(values.tolist(), dtype=torch.float32)) == bits).all()
    with np.errstate(under="ignore"):
        assert (np.array(values.tolist(), "<f4").view(np.uint32) == bits).all()
    above = torch.tensor([2.0**128 - 2.0**103, np.nextafter(2.0**128 - 2.0**103, 0)], dtype=torch.float64)
    assert bits_of(above.to(torch.float32)).tolist() == [0x7F800000, 0x7F7FFFFF]


def test_log_probs_of_a_float64_model_are_rounded_once():
    logits = torch.randn(300, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ids, found = sample(logits, Sampling(seed=1, temperature=0.7), range(300), [0] * 300)
    exact = torch.log_softmax(logits / 0.7, -1).gather(-1, ids[:, None])[:, 0]
    assert (bits_of(found) == exact.numpy().astype(np.float32).view(np.uint32)).all()


def test_log_probs_keep_their_bits_through_log_and_json(tmp_path):
    """Subnormals, -0, the largest and smallest; a decimal text of fewer digits would lose some of them."""
    _, log = rollout_log()
    count = log.token_count
    special = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0xFF7FFFFF, 0xBF800001]
    bits = np.concatenate([special, np.random.default_rng(6).integers(0x80000000, 0xFF800000, count)])[:count]
    values = iter(bits.astype(np.uint32).view(np.float32).tolist())
    log = replace(log, completions=tuple(
        replace(done, logprobs=tuple(next(values) for _ in done.logprobs)) for done in log.completions))
    assert count > len(special) and (bits_of(recorded(decode(encode(log))).values) == bits).all()
    write_rows([{"logprobs": list(done.logprobs)} for done in log.completions], tmp_path / "rows.jsonl")
    read = [value for line in open(tmp_path / "rows.jsonl") for value in json.loads(line)["logprobs"]]
    assert (np.array(read, np.float32).view(np.uint32) == bits).all()
