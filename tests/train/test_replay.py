"""Replay has the bits of the rollout, and every change that decides bits shows in them or is refused by name."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from schedule_logs import SCHEDULES, rollout_log
from tiny_models import tiny_model

from engine.kv import PagedCache
from engine.plan import Pass
from models.checkpoint import load_model, save_model
from models.logprob import token_logprob
from models.looped import LoopedLM
from rollout.log import decode, encode
from rollout.structure import check_structure
from train.replay import check_contract, locate, mismatches, recorded, replay

GATE = SCHEDULES[2]


@pytest.fixture(scope="module")
def made():
    return rollout_log(GATE)


def bits(values):
    return values.view(torch.int32).tolist()


def changed(log, number, **values):
    """The log with fields of one completion changed."""
    completions = list(log.completions)
    completions[number] = replace(completions[number], **values)
    return replace(log, completions=tuple(completions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replay_has_the_bits_of_the_rollout(schedule, dtype):
    """Through the file, with every token and exit drawn again."""
    model, log = rollout_log(schedule, dtype=dtype)
    log = decode(encode(log))
    found = replay(model, log, redraw=True)
    assert found.values.dtype == torch.float32 and len(found.values) == log.token_count > 20
    assert bits(found.values) == bits(recorded(log).values)
    assert found.redrawn.all()


@pytest.mark.parametrize("profile", ["hf", "fused"])
def test_replay_in_both_profiles_and_greedy(profile):
    model = tiny_model(dtype=torch.bfloat16, profile=profile)
    _, log = rollout_log(GATE, model=model, greedy=True)
    found = replay(model, log, redraw=True)
    assert len(mismatches(found, recorded(log))) == 0 and found.redrawn.all()


def test_replay_never_reads_the_recorded_log_probs(made):
    model, log = made

    class Untouchable:
        def __iter__(self):
            raise AssertionError("read")
        __len__ = __getitem__ = __iter__

    blind = replace(log, completions=tuple(replace(c, logprobs=Untouchable()) for c in log.completions))
    assert bits(replay(model, blind, redraw=True).values) == bits(recorded(log).values)
    zeroed = replace(log, completions=tuple(replace(c, logprobs=(0.0,) * len(c.logprobs)) for c in log.completions))
    zeroed = decode(encode(zeroed))
    check_structure(zeroed)
    found = replay(model, zeroed)
    assert bits(found.values) == bits(recorded(log).values)
    assert len(mismatches(found, recorded(zeroed))) == log.token_count


def test_a_place_is_named_by_sequence_and_position(made):
    model, log = made
    response = log.completions[2]
    values = list(response.logprobs)
    values[1] += 1e-6 * abs(values[1])
    wrong = mismatches(replay(model, log), recorded(changed(log, 2, logprobs=tuple(values))))
    assert [locate(log, int(i)) for i in wrong] == [(2, len(response.request.prompt) + 1)]
    ends = [locate(log, i) for i in (0, log.token_count - 1)]
    last = log.completions[-1]
    assert ends == [(0, len(log.completions[0].request.prompt)),
                    (len(log.completions) - 1, len(last.request.prompt) + len(last.token_ids) - 1)]


@pytest.mark.parametrize("index", [0, 4, -1])
def test_another_response_token_is_found(made, index):
    """First, middle, last: in bits, and by drawing again."""
    model, log = made
    number = next(i for i, c in enumerate(log.completions) if c.finish_reason == "length")
    tokens = list(log.completions[number].token_ids)
    tokens[index] = next(t for t in range(29) if t not in (tokens[index], *log.header["stop_ids"]))
    forged = changed(log, number, token_ids=tuple(tokens))
    check_structure(decode(encode(forged)))
    found = replay(model, forged, redraw=True)
    assert len(mismatches(found, recorded(log))) > 0 and not found.redrawn.all()


@pytest.mark.parametrize("place", [0, -1])
def test_another_prompt_token_is_found(made, place):
    model, log = made
    prompt = list(log.completions[1].request.prompt)
    prompt[place] = (prompt[place] + 1) % 29
    forged = changed(log, 1, request=replace(log.completions[1].request, prompt=tuple(prompt)))
    check_structure(decode(encode(forged)))
    assert len(mismatches(replay(model, forged), recorded(log))) > 0


def test_another_temperature_is_found(made):
    model, log = made
    forged = replace(log, header=log.header | {"temperature": 0.8 * (1 + 2**-20)})
    assert len(mismatches(replay(model, forged), recorded(log))) > 0


@pytest.mark.parametrize("field", ["seed", "uid"])
def test_another_seed_or_uid_is_found_by_drawing_again(made, field):
    """No log-prob depends on them; that the sampler drew these tokens does."""
    model, log = made
    if field == "seed":
        forged = replace(log, header=log.header | {"seed": log.header["seed"] + 1})
    else:
        forged = changed(log, 3, request=replace(log.completions[3].request, uid=77))
    check_structure(decode(encode(forged)))
    found = replay(model, forged, redraw=True)
    assert len(mismatches(found, recorded(log))) == 0
    wrong = {locate(log, int(i))[0] for i in torch.nonzero(~found.redrawn)[:, 0]}
    assert wrong == ({3} if field == "uid" else set(range(5)))


@pytest.mark.parametrize("threshold", ["0.45", "0.55"])
def test_an_exit_that_the_gate_does_not_give_is_found(made, threshold):
    """The passes fit the logged depths, so no other check can know what the gate said."""
    model, log = made
    forged = replace(log, header=log.header | {"schedule": f"exit:gate={threshold},min=1,max=3"})
    check_structure(decode(encode(forged)))
    found = replay(model, forged, redraw=True)
    assert len(mismatches(found, recorded(log))) == 0 and not found.redrawn.all()


def flipped(model, name, rows):
    """A model with the lowest bit flipped in the largest value of some rows of weight `name`."""
    weights = {key: value.clone() for key, value in model.weights.items()}
    values = weights[name][rows]
    word = torch.int16 if model.dtype == torch.bfloat16 else torch.int32
    values.view(word).view(-1)[values.abs().argmax()] ^= 1
    weights[name][rows] = values
    return LoopedLM(model.config, weights, profile=model.profile)


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.float32) for name in ("embed", "core.0.q", "core.1.down", "norm")),
    *((name, torch.bfloat16) for name in ("embed", "core.0.k", "core.1.norm_mlp_in", "head"))])
def test_the_lowest_bit_of_a_weight_is_found(name, dtype):
    """By the digest; and, were the digest in the header made anew, by the bits of the replay.

    One float32 value of the head moves one logit of 29 by half a rounding, which softmax may
    round away: there only the digest is sure.
    """
    model, log = rollout_log(GATE, dtype=dtype, new=20)
    used = [t for c in log.completions for t in c.request.prompt + c.token_ids]
    rows = [max(set(used), key=used.count)] if name in ("embed", "head") else slice(None)
    other = flipped(model, name, rows)
    with pytest.raises(RuntimeError, match="made by another model"):
        replay(other, log)
    signed = replace(log, header=log.header | {"weights": other.digest()})
    assert len(mismatches(replay(other, signed), recorded(log))) > 0
    assert len(mismatches(replay(model, signed, same_weights=False), recorded(log))) == 0


FIELDS = {"family": "llama", "loops": 4, "vocab": 30, "dtype": "bfloat16", "profile": "fused", "attention": "eager",
          "linear": "packed", "numerics": "invariant", "rule": {"rows": 4},
          "stages": {"prelude": 0, "core": 3, "coda": 0}}


@pytest.mark.parametrize("name", FIELDS)
def test_another_model_is_refused_by_field(made, name):
    model, log = made
    other = replace(log, header=log.header | {name: FIELDS[name]})
    for same_weights in (True, False):
        with pytest.raises(RuntimeError, match=rf"made with {name} = .*, the model has"):
            check_contract(model, other, same_weights=same_weights)


@pytest.mark.parametrize("name", ["torch", "device", "threads", "environment", "capability", "flux"])
def test_another_process_is_refused_by_setting(made, name):
    model, log = made
    known = log.header["fingerprint"]
    other = replace(log, header=log.header | {"fingerprint": known | {name: 7}})
    message = re.escape(f"made with {name} = 7, this process has {known.get(name)!r}")
    with pytest.raises(RuntimeError, match=message):
        replay(model, other, same_weights=False)


def test_another_thread_count_of_this_process_is_refused(made):
    model, log = made
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="made with threads = 1, this process has 2"):
            replay(model, log)
    finally:
        torch.set_num_threads(1)


def test_a_token_without_its_read_out_is_refused(made):
    """A value left over from an allocation would otherwise be compared, or trained on."""
    model, log = made
    place, event = next((i, e) for i, e in enumerate(log.events) if isinstance(e, Pass) and e.readouts)
    for readouts in (event.readouts[1:], event.readouts * 2):
        events = (*log.events[:place], event._replace(readouts=readouts), *log.events[place + 1:])
        with pytest.raises(RuntimeError, match="response tokens but"):
            replay(model, replace(log, events=events))


# Traps: what else decides bits, or must not.

def test_what_a_cache_held_before_decides_no_bits(made, monkeypatch):
    """A masked key weighs 0, and 0 * NaN is NaN: a page is zeroed when it is taken."""
    model, log = made
    zeroed = PagedCache.__init__

    def dirty(self, *arguments):
        zeroed(self, *arguments)
        for store in (self.keys, self.values, self.hidden):
            store.fill_(float("nan"))

    monkeypatch.setattr(PagedCache, "__init__", dirty)
    assert bits(replay(model, log).values) == bits(recorded(log).values)


def test_weights_that_lie_unaligned_in_the_file_are_copied(tmp_path, made):
    """Mapped weights start wherever the file puts them; off 16 bytes, matrix products give other bits."""
    model, log = made
    save_model(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = file.read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    padding = -first % 16 + 24  # the header may end in spaces: the data then starts 8 bytes off
    file.write_bytes((first - 8 + padding).to_bytes(8, "little") + data[8:first] + b" " * padding + data[first:])
    with safe_open(file, "pt") as opened:
        assert (first + padding) % 16 == 8 and len(list(opened.keys())) == len(model.weights)
    loaded = load_model(tmp_path / "model")
    assert all(weight.data_ptr() % 16 == 0 and weight.is_contiguous() for weight in loaded.weights.values())
    assert bits(replay(loaded, log).values) == bits(recorded(log).values)


@pytest.mark.parametrize("trap", ["off a 16-byte boundary", "row-major"])
def test_weights_laid_out_otherwise_are_refused(made, trap):
    model, _ = made
    weights = dict(model.weights)
    shape = weights["core.0.q"].shape
    if trap == "row-major":
        weights["core.0.q"] = weights["core.0.q"].T.contiguous().T
    else:
        weights["core.0.q"] = torch.empty(shape.numel() + 1)[1:].view(shape).copy_(weights["core.0.q"])
    with pytest.raises(AssertionError, match=trap):
        LoopedLM(model.config, weights)


def test_another_padding_of_keys_gives_close_values_and_no_promise(made):
    """The page size pads keys: it is part of the log, since on most CPUs other paddings give other bits."""
    model, log = made
    wider = replace(log, header=log.header | {"capacity": log.header["capacity"] | {"page_size": 16}})
    assert torch.allclose(replay(model, wider).values, recorded(log).values, rtol=0, atol=1e-5)


def test_another_formula_of_the_log_prob_has_other_bits():
    """Why there is one log-prob function: this one is as right, and differs in the last bit of many values."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(512, 29, generator=generator)
    ids = torch.randint(29, (512,), generator=generator)
    ours = token_logprob(logits, ids, 0.8)
    scaled = logits / 0.8
    other = scaled.gather(-1, ids[:, None])[:, 0] - scaled.logsumexp(-1)
    assert torch.allclose(ours, other, atol=1e-5) and (ours != other).sum() > 50
