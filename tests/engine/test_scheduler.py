"""The scheduler alone, driven by scripts (tests/scripted_rollout.py), audited at every event."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scripted_rollout import Script, drive

from engine.plan import Capacity, Span
from engine.schedule import parse_schedule
from engine.scheduler import Scheduler

WIDE = Capacity(max_sequences=8, max_rows=512, max_span=64, pages=512, page_size=4)


def plain(passes):
    return [[tuple(span) for span in spans] for spans in passes]


# ---- worked by hand ----


def test_periodic_passes_of_one_sequence():
    """exit:periodic=2,4 at T = 4, prompt 2: the fourth token needs loops 3 and 4, and only then do
    the cells (0..4, 3) and (0..4, 4) run, in one span each."""
    trace = drive("exit:periodic=2,4", [Script(2, 5, 5)], WIDE)
    assert plain(trace.passes) == [
        [(0, 1, 0, 2)], [(0, 2, 0, 2)],
        [(0, 1, 2, 3)], [(0, 2, 2, 3)],
        [(0, 1, 3, 4)], [(0, 2, 3, 4)],
        [(0, 1, 4, 5)], [(0, 2, 4, 5)], [(0, 3, 0, 5)], [(0, 4, 0, 5)],
        [(0, 1, 5, 6)], [(0, 2, 5, 6)],
    ]
    assert trace.depths == {0: [2, 2, 2, 4, 2]}
    assert trace.peak_catch_up == 4  # cells 0..3 with the needing position 4


def test_periodic_passes_under_a_span_cap():
    """Catch-up of 5 cells at most 3 at a time: the needing position stands in the last span."""
    trace = drive("exit:periodic=2,4", [Script(2, 4, 4)],
                  Capacity(max_sequences=1, max_rows=8, max_span=3, pages=64, page_size=4))
    assert plain(trace.passes)[6:] == [
        [(0, 1, 4, 5)], [(0, 2, 4, 5)],
        [(0, 3, 0, 3)], [(0, 3, 3, 5)], [(0, 4, 0, 3)], [(0, 4, 3, 5)],
    ]
    assert trace.peak_catch_up == 3
    assert trace.own_passes == {0: [(2, False), (2, False), (2, False), (4, True)]}


def test_two_sequences_at_different_loops_share_passes():
    """A prompt of 3 in chunks of 2 beside a prompt of 1: a row budget of 3 leaves the second one row."""
    trace = drive("exit:2", [Script(3, 1, 1), Script(1, 2, 2)],
                  Capacity(max_sequences=2, max_rows=3, max_span=2, pages=64, page_size=4))
    assert plain(trace.passes) == [
        [(0, 1, 0, 2), (1, 1, 0, 1)],
        [(0, 1, 2, 3), (1, 2, 0, 1)],
        [(0, 2, 0, 2), (1, 1, 1, 2)],
        [(0, 2, 2, 3), (1, 2, 1, 2)],
    ]
    assert trace.finished == [0, 1]


def test_a_long_catch_up_of_one_sequence_does_not_hold_up_another():
    """Sequence 0 catches up 40 cells in spans of 4; sequence 1 goes on token by token meanwhile."""
    capacity = Capacity(max_sequences=2, max_rows=5, max_span=4, pages=64, page_size=8)
    trace = drive("exit:gate=0.5", [Script(40, 2, 2), Script(1, 30, 30)], capacity, loops=2,
                  leaves=lambda number, position, loop: number == 1 or position == 39)
    bursts = [i for i, spans in enumerate(trace.passes) if spans[0].sequence == 0 and spans[0].loop == 2]
    assert [tuple(trace.passes[i][0])[2:] for i in bursts] == [
        *((s, s + 4) for s in range(0, 40, 4)), (40, 41)]
    assert all(trace.passes[i][1].sequence == 1 for i in bursts)
    assert trace.peak_catch_up == 4


def test_two_and_a_half_passes_a_token_in_steady_state():
    """T = 4, exit:periodic=2,4, eight sequences of 40 tokens: 100 passes, 2.5 a token, exactly."""
    trace = drive("exit:periodic=2,4", [Script(5, 40, 40) for _ in range(8)], WIDE)
    assert len(trace.passes) == 100
    one = drive("exit:periodic=2,4", [Script(1, 400, 400)],
                Capacity(max_sequences=1, max_rows=64, pages=512))
    assert len(one.passes) == 1000


def test_dense_and_exit_2_passes():
    assert len(drive("dense", [Script(5, 7, 7)], WIDE).passes) == 28
    shallow = drive("exit:2", [Script(5, 7, 7)], WIDE)
    assert len(shallow.passes) == 14
    assert {loop for _, loop in shallow.cells[0]} == {1, 2}  # loop 3 never runs, prompt included
    assert shallow.peak_catch_up == 0


def test_loops_beyond_the_deepest_exit_never_run():
    """The gate lets everyone leave at loop 1 but one position: loop 2 runs up to there, 3 never."""
    trace = drive("exit:gate=0.5,max=3", [Script(3, 8, 8)], WIDE,
                  leaves=lambda number, position, loop: loop == 2 or position != 6)
    assert trace.depths[0] == [1, 1, 1, 1, 2, 1, 1, 1]
    assert sorted(p for p, loop in trace.cells[0] if loop == 2) == list(range(7))
    assert not any(loop > 2 for _, loop in trace.cells[0])
    assert trace.peak_catch_up == 6


# ---- admission ----


@pytest.mark.parametrize("text, pages", [("dense", 20), ("exit:2", 10), ("exit:gate=0.5,max=3", 15),
                                         ("exit:periodic=1,4", 20), ("exit:mix=1:1,3:1,4:0", 15)])
def test_the_largest_request_that_fits_and_the_first_that_does_not(text, pages):
    """17 positions are ever run (the last token is sampled, not run): 5 pages of 4 a loop."""
    def scheduler(available):
        return Scheduler(parse_schedule(text, 4), Capacity(pages=available, page_size=4), seed=0)

    scheduler(pages).add(0, 0, prompt=8, max_new=10)
    with pytest.raises(ValueError, match=rf"request 3: 8 prompt \+ 10 new tokens at {pages // 5} loops "
                                         rf"need {pages} pages of 4 positions; the engine has {pages - 1}"):
        scheduler(pages - 1).add(3, 0, prompt=8, max_new=10)
    scheduler(pages).add(0, 0, prompt=8, max_new=13)  # 20 positions still fill 5 pages
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        scheduler(pages).add(0, 0, prompt=8, max_new=14)


def test_the_worst_case_is_used_up_exactly():
    """A request that reserves all pages runs to its last token."""
    trace = drive("dense", [Script(8, 10, 10)], Capacity(max_sequences=1, max_rows=64, pages=20, page_size=4))
    assert trace.depths[0] == [4] * 10
    assert len(trace.cells[0]) == 4 * 17


def test_the_first_in_line_is_not_overtaken():
    """0 and 1 fill the pages; 2 is large and waits; 3 would fit at once but stays behind 2."""
    scripts = [Script(4, 5, 5), Script(4, 5, 2), Script(4, 9, 1), Script(1, 1, 1)]
    trace = drive("exit:1", scripts, Capacity(max_sequences=4, max_rows=64, pages=4, page_size=4))
    assert trace.admitted == [0, 1, 2, 3]
    assert trace.finished == [1, 0, 2, 3]


def test_max_sequences_bounds_the_batch():
    scripts = [Script(2, 3, 3) for _ in range(7)]
    trace = drive("exit:2", scripts, Capacity(max_sequences=3, max_rows=64, pages=512))
    assert max(len(spans) for spans in trace.passes) == 3
    assert trace.finished == list(range(7))


def test_a_row_cap_equal_to_the_sequences_still_moves_everyone():
    capacity = Capacity(max_sequences=4, max_rows=4, max_span=64, pages=512)
    trace = drive("exit:2", [Script(9, 3, 3) for _ in range(4)], capacity)
    assert all(len(spans) == 4 and all(s.stop - s.start == 1 for s in spans) for spans in trace.passes)


# ---- generated workloads ----

SCHEDULES = st.one_of(
    st.just("dense"), st.integers(1, 3).map("exit:{}".format),
    st.tuples(st.integers(1, 3), st.integers(1, 5)).map(lambda v: "exit:periodic={},{}".format(*v)),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)).map(
        lambda v: "exit:mix=1:{},2:{},3:{}".format(*v)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).map(
        lambda v: f"exit:gate=0.5,min={min(v)},max={max(v)}"))


@st.composite
def workloads(draw):
    max_new = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    scripts = [Script(draw(st.integers(1, 9)), new, draw(st.integers(1, new))) for new in max_new]
    sequences = draw(st.integers(1, 4))
    capacity = Capacity(max_sequences=sequences, max_rows=draw(st.integers(sequences, sequences + 8)),
                        max_span=draw(st.integers(1, 6)), pages=draw(st.integers(3, 40)),
                        page_size=draw(st.integers(1, 5)))
    return draw(SCHEDULES), scripts, capacity, draw(st.integers(0, 2**16))


@given(workloads())
def test_generated_workloads(workload):
    """Invariants after every event (in `drive`), and what must hold of the whole run."""
    text, scripts, capacity, seed = workload
    deepest = parse_schedule(text, 3).max_depth
    assume(all(deepest * -(-(s.prompt + s.max_new - 1) // capacity.page_size) <= capacity.pages
               for s in scripts))

    def leaves(number, position, loop):
        return (seed >> (number + 3 * position + 5 * loop) % 16) & 1 == 1

    trace = drive(text, scripts, capacity, loops=3, seed=seed, leaves=leaves)
    assert trace == drive(text, scripts, capacity, loops=3, seed=seed, leaves=leaves)
    assert sorted(trace.finished) == list(range(len(scripts)))
    # Progress: a pass gives every active sequence a row, so a run cannot take more passes than
    # there are cells.
    assert len(trace.passes) <= sum(len(cells) for cells in trace.cells.values())
    for number, script in enumerate(scripts):
        depths, cells = trace.depths[number], trace.cells[number]
        assert len(depths) == script.length
        for depth, (own, _) in zip(depths, trace.own_passes[number], strict=True):
            assert own == depth, "a position takes one pass a loop of its own"
        # What ran is what the read-outs need, and nothing else.
        newest = range(script.prompt - 1, script.prompt - 1 + script.length)
        needed = {(p, loop) for position, depth in zip(newest, depths, strict=True)
                  for loop in range(1, depth + 1) for p in range(position + 1)}
        assert cells == needed


@given(text=SCHEDULES, prompts=st.lists(st.integers(1, 9), min_size=1, max_size=5), new=st.integers(1, 9))
def test_without_caps_a_token_costs_its_depth_in_passes(text, prompts, new):
    """Sequences side by side: as many passes as the longest chain of depths, none cut short."""
    trace = drive(text, [Script(prompt, new, new) for prompt in prompts], WIDE, loops=3,
                  leaves=lambda number, position, loop: (number + position) % 3 == loop)
    assert len(trace.passes) == max(sum(depths) for depths in trace.depths.values())
    assert not any(cut for passes in trace.own_passes.values() for _, cut in passes)


# ---- the audit itself ----


@pytest.mark.parametrize("damage, named", [
    (lambda s: s.active[0].frontier.__setitem__(2, 4), "invariant 1"),
    (lambda s: s.active[0].frontier.__setitem__(0, 9), "invariant 2"),
    (lambda s: s.active[0].frontier.__setitem__(slice(1, 4), [3, 3, 1]), "invariant 3"),
    (lambda s: setattr(s, "reserved", s.reserved - 1), "invariant 4"),
    (lambda s: setattr(s, "capacity", Capacity(max_sequences=1, pages=512, page_size=4)), "invariant 4"),
    (lambda s: setattr(s.active[0], "limit", s.active[0].limit + 9), "invariant 4"),
    (lambda s: s.active[0].frontier.__setitem__(slice(0, 3), [8, 9, 3]), "invariant 1"),
    (lambda s: s.waiting.appendleft(s.active.pop(1)), "invariant 4"),
    (lambda s: s.waiting.rotate(), "invariant 5"),
])
def test_check_integrity_finds_damage(damage, named):
    scheduler = Scheduler(parse_schedule("exit:2", 3), WIDE, seed=0)
    for number in range(4):
        scheduler.add(number, number, prompt=3, max_new=6)
    for _ in range(2):
        scheduler.admit()
    plan = scheduler.plan()
    scheduler.advance(plan.spans)
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises(AssertionError, match=named):
        scheduler.check_integrity()


def test_a_span_off_the_frontier_is_refused():
    scheduler = Scheduler(parse_schedule("dense", 3), WIDE, seed=0)
    scheduler.add(0, 0, prompt=3, max_new=2)
    scheduler.admit()
    for span in (Span(0, 1, 1, 3), Span(0, 1, 0, 4), Span(0, 2, 0, 1)):
        with pytest.raises(AssertionError, match="off frontier"):
            scheduler.advance((span,))


CAPACITIES = [({"pages": 0}, "pages = 0"), ({"max_span": 2.0}, "max_span = 2.0"),
              ({"row_multiple": True}, "row_multiple = True"),
              ({"max_rows": 4, "max_sequences": 5}, "max_rows = 4 is below max_sequences = 5")]


@pytest.mark.parametrize("fields, named", CAPACITIES)
def test_capacity_refuses_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        Capacity(**fields)
