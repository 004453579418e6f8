"""Drawing again under truncated sampling: the options of the log, nothing else."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model, tokens

from engine import Capacity, Engine, Request, Sampling
from rollout.log import decode, encode, from_rollout
from rollout.structure import check_structure
from train.replay import mismatches, recorded, replay

SMALL = Capacity(max_sequences=3, max_rows=16, max_span=5, pages=120, page_size=4)


def made(schedule="exit:gate=0.6", **drawn):
    """(model, log) of 6 sequences of 12 new tokens."""
    model = tiny_model(dtype=torch.float32)
    requests = [Request(tuple(tokens(3 + i, seed=i)), 12, uid=100 + i) for i in range(6)]
    rollout = Engine(model, schedule, SMALL).generate(requests, Sampling(seed=5, temperature=0.9, **drawn))
    return model, decode(encode(from_rollout(rollout)))


@pytest.mark.parametrize("drawn", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.8}])
def test_truncated_tokens_are_drawn_again_and_replay_has_the_recorded_bits(drawn):
    model, log = made(**drawn)
    check_structure(log)
    found = replay(model, log, redraw=True)
    assert len(mismatches(found, recorded(log))) == 0 and found.redrawn.all()
    assert [c.token_ids for c in log.completions] != [c.token_ids for c in made()[1].completions]


@pytest.mark.parametrize("forged", [{"top_k": 0}, {"top_k": 2}, {"top_p": 0.3}])
def test_other_options_than_the_logs_draw_other_tokens(forged):
    model, log = made(top_k=4)
    found = replay(model, replace(log, header=log.header | forged), redraw=True)
    assert not found.redrawn.all()


def test_a_log_of_impossible_sampling_is_refused():
    _, log = made(top_k=4)
    with pytest.raises(RuntimeError, match="header: top_k = 4, top_p = 1.0 change nothing"):
        check_structure(replace(log, header=log.header | {"greedy": True}))
    for name, value in (("top_k", -1), ("top_k", 2.0), ("top_p", 0), ("top_p", 1.5), ("top_p", True)):
        with pytest.raises(RuntimeError, match=f"header: {name} = {value!r} must be"):
            decode(encode(replace(log, header=log.header | {name: value})))
