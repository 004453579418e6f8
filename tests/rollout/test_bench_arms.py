"""Figures of a benchmark worked out by hand from given times."""

import pytest
import torch
from tiny_models import tiny_model

from engine import Sampling
from engine.clock import PHASES, Seconds
from rollout import bench_parts
from rollout.bench_arms import Turn, Workload, make_arms, rotated, rows, run_turns
from rollout.bench_parts import measure_parts
from rollout.bench_ranks import Ranks
from rollout.statistics import Statistics

LOAD = Workload(batch=2, prompt=3, new=4, turns=2, sampling=Sampling(seed=7))


def turn(total, *, decode=1.0, encode=0.0, tokens=8, **phases):
    """A turn of `total` seconds, all in passes but for `phases`."""
    spent = dict.fromkeys(PHASES, 0.0) | phases
    spent["passes"] = total - sum(phases.values())
    counts = Statistics(sequences=2, prompt_tokens=6, tokens=tokens, passes=10, spans=20, rows=40, padded_rows=160,
                        dense_cells=60, catch_up_rows=6, peak_catch_up=3, depths=(0, 4, 4))
    return Turn(counts, Seconds(**spent, ends=(), ran=()), encode, tokens - 2, decode, 9, decode, 30, 10)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def test_a_ratio_is_taken_within_a_turn(model):
    """Rates 8 / s. dense 8, 2; exit 8, 4: medians 5 and 6, ratios 1 and 2, so 1.5 and not 6 / 5."""
    arms = make_arms([model], ["dense", "exit:1"], LOAD)
    dense, early = rows(arms, LOAD, [[[turn(1), turn(4)], [turn(1, decode=3.0), turn(2)]]])
    assert (dense["tokens_per_s"], dense["tokens_per_s_least"], dense["tokens_per_s_most"]) == (5, 2, 8)
    assert (early["ratio_to_dense"], early["ratio_to_dense_least"], early["ratio_to_dense_most"]) == (1.5, 1, 2)
    assert (early["decode_tokens_per_s"], early["decode_tokens_per_s_least"]) == (4, 2)
    assert (early["passes_per_token"], early["rows_per_pass"], early["padded_rows_per_pass"]) == (2.5, 4, 16)
    assert (early["catch_up_rows"], early["catch_up_share"], early["peak_catch_up"]) == (6, 6 / 40, 3)
    assert early["gathered_share"] == 0.25


def test_ranks_add_up_within_a_turn(model):
    """Rank 0: dense 8, 8 and exit 16, 16; rank 1: dense 4, 8 and exit 8, 16."""
    arms = make_arms([model], ["dense", "exit:1"], LOAD)
    dense, early = rows(arms, LOAD, [[[turn(1), turn(1)], [turn(0.5), turn(0.5)]],
                                     [[turn(2), turn(1)], [turn(1), turn(0.5)]]])
    assert (dense["tokens_per_s_least"], dense["tokens_per_s_most"]) == (12, 16)
    assert (early["tokens_per_s_least"], early["tokens_per_s_most"], early["ratio_to_dense"]) == (24, 32, 2)
    assert early["catch_up_rows"] == 12


def test_a_schedule_counts_on_its_fastest_operator(model):
    """dense 4 native, 8 packed; exit:1 16 native, 8 packed."""
    packed = tiny_model(dtype=torch.float32)
    packed.linear = "packed"
    arms = make_arms([model, packed], ["exit:1", "dense"], LOAD)
    found = rows(arms, LOAD, [[[turn(s)] * 2 for s in (0.5, 1, 2, 1)]])
    assert [(row["schedule"], row["linear"], row["fastest"], row["ratio_to_dense"]) for row in found] == [
        ("exit:1", "native", True, 2), ("exit:1", "packed", False, 1), ("dense", "native", False, 0.5),
        ("dense", "packed", True, 1)]
    assert {row["dense_linear"] for row in found} == {"packed"}


def test_shares_hold_the_encoding_of_the_log(model):
    """10 s a turn, of which 1 plan, 0.5 gate, 0.5 commit, 2 sampling, 1 head, 0.5 header; 2.5 s of encoding."""
    timed = turn(10.0, plan=1.0, gate=0.5, commit=0.5, sampling=2.0, head=1.0, header=0.5, encode=2.5)
    row, = rows(make_arms([model], ["dense"], LOAD), LOAD, [[[timed, timed]]])
    assert row["shares"] == pytest.approx({"passes": 0.36, "head": 0.08, "sampling": 0.16, "scheduling": 0.16,
                                           "log": 0.24, "start": 0})
    assert row["outside_share"] == pytest.approx(0.64)


def test_orders_rotate_and_turn_round():
    assert ["".join(rotated("abc", turn)) for turn in range(-1, 6)] == ["bac", "abc", "cba", "bca", "acb", "cab", "bac"]
    assert ["".join(rotated("ab", turn)) for turn in range(4)] == ["ab", "ba", "ba", "ab"]


def test_turns_draw_new_tokens_and_arms_of_a_turn_the_same(model, monkeypatch):
    from engine.engine import Engine

    seen, generate = [], Engine.generate

    def recording(self, requests, sampling):
        seen.append((self.schedule.text, sampling.seed, [r.uid for r in requests]))
        return generate(self, requests, sampling)

    monkeypatch.setattr(Engine, "generate", recording)
    turns, last = run_turns(make_arms([model], ["dense", "exit:1"], LOAD), LOAD, Ranks(rank=1))
    assert seen == [(text, seed, [2, 3]) for text, seed in (
        ("dense", 7), ("exit:1", 7), ("dense", 7), ("exit:1", 7), ("exit:1", 8), ("dense", 8))]
    assert [len(found) for found in turns] == [2, 2] and last.header["seed"] == 8
    # 4 to 6 keys lie in one page of 16: 3 loops of 4 tokens of 2 sequences, all in one call, so read in place.
    keys = (3 * 4 * 2 * 16, 0)
    # Dense of 3 loops: the first token after 3 passes; 3 tokens of 2 sequences in 9 passes after that.
    first = turns[0][0]
    assert (first.decode_tokens, first.decode_passes) == (6, 9)
    assert 0 < first.decode_ran < first.decode_seconds < first.seconds.total
    assert (first.keys_in_place, first.keys_gathered) == (last.keys_in_place, last.keys_gathered) == keys


def test_parts_run_as_often_and_as_wide_as_dense_decodes(model, monkeypatch):
    """2 layers of 7 products, 3 loops, 3 tokens after the first: 9 passes over 4, 5, 6 keys, three turns."""
    products, attended = [], []
    linear, attention = bench_parts.linear, bench_parts.attention
    monkeypatch.setattr(bench_parts, "linear", lambda x, *rest: (products.append(x.shape[0]), linear(x, *rest))[1])
    monkeypatch.setattr(bench_parts, "attention", lambda q, k, *rest: (
        attended.append((q.shape[0], q.shape[2], k.shape[2])), attention(q, k, *rest))[1])
    found = measure_parts(model, LOAD)
    assert products == [2] * (3 * 9 * 2 * 7)
    assert attended == 3 * [(2, 1, keys) for keys in (4, 5, 6) for _ in range(3 * 2)]
    assert (found["passes"], found["keys"], found["rows"]) == (9, [4, 6], 2)
