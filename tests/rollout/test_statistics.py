"""Counts and timelines of schedules, worked out by hand."""

import pytest
from schedule_logs import SCHEDULES, rollout_log
from tiny_models import tiny_model

from engine import Capacity, Engine, Request, Sampling
from rollout.log import from_rollout
from rollout.statistics import Statistics, decoding, statistics
from rollout.timeline import Ran, Read, Timeline, Waited, timeline


def one(schedule, prompt=2, new=4, loops=3, **capacity):
    """The log of one sequence that runs to its length."""
    requests = [Request(tuple(range(1, 1 + prompt)), new, uid=1)]
    engine = Engine(tiny_model(loops=loops), schedule, Capacity(**capacity))
    return from_rollout(engine.generate(requests, Sampling()))


def test_counts_of_a_periodic_schedule_by_hand():
    """3 loops, depth 1 but every 2nd token at 3; prompt of 2, so positions 0..4 are inputs.

    Passes: loop 1 of the prompt (2 rows, read), loop 1 of position 2, loop 2 of 0-2, loop 3 of 0-2
    (read), loop 1 of 3 (read), loop 1 of 4, loop 2 of 3-4, loop 3 of 3-4 (read): 8 passes, 4 tokens.
    """
    found = statistics(one("exit:periodic=1,2"))
    assert found == Statistics(
        sequences=1, prompt_tokens=2, tokens=4, passes=8, spans=8, rows=2 + 1 + 3 + 3 + 1 + 1 + 2 + 2, padded_rows=15,
        dense_cells=15, catch_up_rows=2 + 2 + 1 + 1, peak_catch_up=2, depths=(2, 0, 2))
    assert (found.passes_per_token, found.rows_per_pass, found.cell_share, found.mean_depth) == (2, 15 / 8, 1, 2)
    assert found.depth_shares == (0.5, 0, 0.5)


def test_what_is_never_needed_is_not_counted():
    found = statistics(one("exit:1"))
    assert (found.passes, found.rows, found.dense_cells, found.cell_share) == (4, 5, 15, 1 / 3)
    assert (found.catch_up_rows, found.peak_catch_up) == (0, 0)


def test_a_prompt_in_chunks_is_no_catch_up():
    found = statistics(one("dense", prompt=5, max_span=2))
    assert (found.passes, found.catch_up_rows, found.padded_rows) == (3 * 3 + 3 * 3, 0, 24)


def test_passes_per_token_does_not_depend_on_the_batch():
    """A pass counts once for each sequence in it: dense takes T a token, alone or in company."""
    for count in (1, 4):
        requests = [Request((1, 2), 6, uid=i) for i in range(count)]
        log = Engine(tiny_model(), "dense", Capacity()).generate(requests, Sampling())
        found = statistics(log)
        assert (found.passes, found.passes_per_token) == (18, 3)


def test_padding_is_counted_apart():
    found = statistics(one("dense", row_multiple=4))
    assert (found.rows, found.padded_rows) == (15, 4 * 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_the_schedulers(schedule):
    _, log = rollout_log(schedule)
    found = statistics(log)
    assert found.peak_catch_up == log.peak_catch_up and sum(found.depths) == found.tokens == log.token_count


def test_the_sum_is_that_of_the_logs():
    parts = [statistics(rollout_log(SCHEDULES[2], seed=seed)[1]) for seed in (1, 2)]
    both = parts[0] + parts[1]
    assert both.tokens == parts[0].tokens + parts[1].tokens and both.rows == parts[0].rows + parts[1].rows
    assert both.depths == tuple(a + b for a, b in zip(parts[0].depths, parts[1].depths, strict=True))
    assert both.peak_catch_up == max(part.peak_catch_up for part in parts)


def test_a_timeline_by_hand():
    """The schedule of the first test, cell by cell."""
    found = timeline(one("exit:periodic=1,2"), 0)
    assert found == Timeline(
        prompt=2, positions=5, first=0, last=8,
        ran=(Ran(0, 1, 0, 2, 0), Ran(1, 1, 2, 3, 0), Ran(2, 2, 0, 3, 2), Ran(3, 3, 0, 3, 2), Ran(4, 1, 3, 4, 0),
             Ran(5, 1, 4, 5, 0), Ran(6, 2, 3, 5, 1), Ran(7, 3, 3, 5, 1)),
        waited=(Waited(0, 2, 1, 2), Waited(1, 2, 1, 2), Waited(3, 2, 5, 6)),
        read=(Read(0, 1, 1), Read(3, 2, 3), Read(4, 3, 1), Read(7, 4, 3)))


def test_a_cell_that_never_runs_waits_to_the_end():
    found = timeline(one("exit:2", new=3), 0)
    assert found.waited == (Waited(0, 3, 2, 6), Waited(1, 3, 2, 6), Waited(2, 3, 4, 6))


def test_timelines_of_a_batch_cover_every_cell():
    _, log = rollout_log(SCHEDULES[2])
    lines = [timeline(log, number) for number in range(5)]
    assert sum(r.stop - r.start for t in lines for r in t.ran) == statistics(log).rows
    assert [len(t.read) for t in lines] == [len(c.token_ids) for c in log.completions]
    with pytest.raises(ValueError, match="sequence 5 is not in the log"):
        timeline(log, 5)


@pytest.mark.parametrize("schedule, options, found", [
    ("dense", {}, (3, 3)),
    ("exit:periodic=1,2", {}, (1, 3)),  # the first token leaves at loop 1; its deeper prompt cells are run later
    ("dense", {"prompt": 5, "max_span": 2}, (9, 3)),  # three chunks at three loops
    ("dense", {"new": 1}, (3, 0))])
def test_decoding_starts_where_the_first_token_is_read_out(schedule, options, found):
    assert decoding(one(schedule, **options)) == found


def test_decoding_starts_when_the_slowest_prompt_is_read_out():
    """Prompts of 1 and 5 in chunks of 2: the first sequence has 3 of its 4 tokens by pass 9."""
    requests = [Request((1,), 4, uid=1), Request((1, 2, 3, 4, 5), 4, uid=2)]
    log = Engine(tiny_model(), "dense", Capacity(max_span=2)).generate(requests, Sampling())
    assert decoding(log) == (9, 4)
