"""The engine's contract: when texts end, what a completion holds, what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model, tokens

import engine.engine
from engine import Capacity, Engine, Request, Sampling
from engine.engine import _Run
from engine.plan import Admit, Finish, Pass

SMALL = Capacity(max_sequences=3, max_rows=24, max_span=7, pages=200, page_size=4)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def scripted(monkeypatch):
    """Replaces sampling by given texts: `scripted({uid: (prompt length, ids)})`."""
    def install(texts):
        def sample(logits, sampling, uids, positions):
            ids = [texts[uid][1][position + 1 - texts[uid][0]]
                   for uid, position in zip(uids, positions, strict=True)]
            return torch.tensor(ids), -0.5 - torch.arange(len(ids), dtype=torch.float32)
        monkeypatch.setattr(engine.engine, "sample", sample)
    return install


def decode(ids):
    """Token i as the letter of its number; 26 and up decode to nothing, as special tokens do."""
    return "".join(chr(ord("a") + i) for i in ids if i < 26)


# ---- ends ----


@pytest.mark.parametrize("text", ["dense", "exit:periodic=1,2"])
def test_every_stop_id_of_the_union_ends_a_text_and_is_recorded(model, scripted, text):
    """The stop id is kept, with its log-prob and depth; a limit reached on it is a stop."""
    scripted({1: (2, [9, 9, 4]), 2: (3, [9, 28]), 3: (1, [4]), 4: (2, [9] * 6)})
    asked = [Request((1, 2), 3, 1), Request((1, 2, 3), 6, 2), Request((1,), 6, 3), Request((5, 6), 6, 4)]
    done = Engine(model, text, SMALL).generate(asked, Sampling(stop_ids=(28, 4))).completions
    assert [(d.token_ids, d.finish_reason, d.stop_id) for d in done] == [
        ((9, 9, 4), "stop", 4), ((9, 28), "stop", 28), ((4,), "stop", 4), ((9,) * 6, "length", None)]
    assert all(len(d.token_ids) == len(d.logprobs) == len(d.exit_depths) for d in done)
    assert [d.request for d in done] == asked


def test_a_text_cut_by_length_gets_no_stop_id(model, scripted):
    """An end-of-text that nobody sampled would have no log-prob."""
    scripted({1: (2, list(range(1, 9))), 2: (2, [7])})
    done = Engine(model, "exit:2", SMALL).generate([Request((1, 2), 8, 1), Request((1, 2), 1, 2)],
                                                   Sampling(stop_ids=(0, 28))).completions
    assert [(d.token_ids, d.finish_reason, d.stop_id) for d in done] == [
        ((1, 2, 3, 4, 5, 6, 7, 8), "length", None), ((7,), "length", None)]


def test_stop_strings_keep_the_token_that_completes_them(model, scripted):
    """'cab' over three tokens, with a token without text between; ids flow unchanged."""
    scripted({1: (2, [2, 27, 0, 1, 5, 5]), 2: (2, [0, 1, 2, 0, 3, 3]), 3: (2, [2, 0, 5, 1, 1, 1])})
    done = Engine(model, "exit:2", SMALL, decode=decode).generate(
        [Request((1, 2), 6, uid) for uid in (1, 2, 3)], Sampling(stop_strings=("cab", "dd"))).completions
    assert [(d.token_ids, d.finish_reason, d.stop_id) for d in done] == [
        ((2, 27, 0, 1), "stop_string", None), ((0, 1, 2, 0, 3, 3), "stop_string", None),
        ((2, 0, 5, 1, 1, 1), "length", None)]
    assert len(done[0].logprobs) == 4


def test_a_stop_string_in_the_prompt_does_not_count(model, scripted):
    scripted({1: (3, [1, 5, 5])})
    done = Engine(model, "dense", SMALL, decode=decode).generate(
        [Request((2, 0, 1), 3, 1)], Sampling(stop_strings=("cab", "ab"))).completions
    assert done[0].finish_reason == "length"


def test_a_stop_id_in_the_prompt_does_not_count(model, scripted):
    scripted({1: (3, [1, 5, 4])})
    done = Engine(model, "dense", SMALL).generate([Request((4, 4, 4), 3, 1)], Sampling(stop_ids=(4,)))
    assert done.completions[0].token_ids == (1, 5, 4)


# ---- identity of samples ----


def test_a_group_with_one_seed_gets_distinct_texts(model):
    """Eight samples of one prompt differ by uid alone."""
    group = [Request((3, 1, 4), 8, uid=100 + i) for i in range(8)]
    done = Engine(model, "exit:2").generate(group, Sampling(seed=1)).completions
    assert len({d.token_ids for d in done}) == 8


def test_group_size_is_the_callers(model):
    """Two prompts, four samples each: eight texts, in the order of the requests."""
    asked = [Request((prompt,), 3, uid=10 * prompt + i, group=prompt, sample=i)
             for prompt in (1, 2) for i in range(4)]
    done = Engine(model, "exit:1", SMALL).generate(asked, Sampling()).completions
    assert [d.request for d in done] == asked


def test_the_seed_reaches_the_sampler(model):
    def text(seed):
        return [d.token_ids for d in Engine(model).generate(asked, Sampling(seed=seed)).completions]

    asked = [Request((3, 1, 4), 8, uid=i) for i in range(2)]
    assert text(1) == text(1)
    assert text(1) != text(2) and text(1) != text(1 + 2**32)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_tempered_logits(model, monkeypatch, temperature):
    """The first token included: log softmax(logits / temperature) at the sampled id."""
    seen, sample = [], engine.engine.sample

    def recording(logits, *rest):
        found = sample(logits, *rest)
        seen.append((logits, found))
        return found

    monkeypatch.setattr(engine.engine, "sample", recording)
    [done] = Engine(model, "exit:2").generate([Request((3, 1, 4), 6, 1)],
                                              Sampling(temperature=temperature)).completions
    assert done.token_ids == tuple(ids.item() for _, (ids, _) in seen)
    for logprob, token, (logits, _) in zip(done.logprobs, done.token_ids, seen, strict=True):
        right = torch.log_softmax(logits[0].double() / temperature, -1)[token].item()
        assert logprob == pytest.approx(right, abs=1e-6)
        assert logprob == torch.tensor(logprob, dtype=torch.float32).item()


def test_events_in_order_and_completions_as_they_finish(model):
    finished = []
    asked = [Request(tuple(tokens(5, seed=i)), 3 - i % 3, uid=i) for i in range(7)]
    rollout = Engine(model, "exit:2", SMALL).generate(asked, Sampling(), finished.append)
    assert sorted(finished, key=lambda d: d.request.uid) == list(rollout.completions)
    order = [event.sequence for event in rollout.events if isinstance(event, Finish)]
    assert order == [d.request.uid for d in finished]
    assert [event.sequence for event in rollout.events if isinstance(event, Admit)] == list(range(7))
    passes = [event for event in rollout.events if isinstance(event, Pass)]
    readouts = [readout for event in passes for readout in event.readouts]
    assert len(readouts) == sum(len(d.token_ids) for d in rollout.completions)
    for event in passes:
        ends, row = {}, 0
        for span in event.spans:
            row += span.stop - span.start
            ends[row - 1] = (span.sequence, span.stop - 1, span.loop)
        assert all(ends[r.row] == (r.sequence, r.position, r.loop) for r in event.readouts)
        assert event.padded_rows == row and event.head_rows == len(event.readouts)


def test_padded_row_counts_are_recorded(model):
    capacity = replace(SMALL, row_multiple=4, head_multiple=3)
    rollout = Engine(model, "exit:2", capacity).generate([Request((1, 2, 3, 4, 5), 2, 1)], Sampling())
    passes = [event for event in rollout.events if isinstance(event, Pass)]
    assert [(p.padded_rows, p.head_rows) for p in passes] == [(8, 0), (8, 3), (4, 0), (4, 3)]


def test_the_header_states_what_was_in_force(model):
    """No hidden sampling default: what is not in the header was not applied."""
    sampling = Sampling(seed=2**40, temperature=0.7, stop_ids=(4, 0), stop_strings=("ab",))
    header = Engine(model, "exit:gate=.5", SMALL, decode=decode).generate([Request((1,), 2, 1)], sampling).header
    expected = {"seed": 2**40, "temperature": 0.7, "greedy": False, "stop_ids": [4, 0], "stop_strings": ["ab"],
                "schedule": "exit:gate=0.5,min=1,max=3", "catch_up": "lazy", "capacity": vars(SMALL),
                "policy_version": 0, "weights": model.digest(), "dtype": "float32", "profile": "hf",
                "numerics": "shapes", "attention": "sdpa", "loops": 3, "vocab": 29}
    assert {name: header[name] for name in expected} == expected


def test_no_requests_no_work(model):
    rollout = Engine(model).generate([], Sampling())
    assert rollout.completions == () and rollout.events == ()


def test_peak_catch_up_is_reported(model):
    rollout = Engine(model, "exit:periodic=1,3").generate([Request((1, 2), 3, 1)], Sampling())
    assert rollout.peak_catch_up == 3  # the third token needs loops 2 and 3 of cells 0..2 first


# ---- refusals ----

GOOD = Request((1, 2), 4, uid=7)
BAD_REQUESTS = [
    (replace(GOOD, prompt=()), "the prompt is empty"),
    (replace(GOOD, prompt=(1, 29)), "token id 29 is no integer within the vocabulary of 29"),
    (replace(GOOD, prompt=(-1, 1)), "token id -1"),
    (replace(GOOD, prompt=(1, 2.0)), "token id 2.0"),
    (replace(GOOD, prompt=(True, 2)), "token id True"),
    (replace(GOOD, max_new_tokens=0), "max_new_tokens = 0"),
    (replace(GOOD, max_new_tokens=1.5), "max_new_tokens = 1.5"),
    (replace(GOOD, max_new_tokens=63), r"2 prompt \+ 63 new tokens exceed max_positions = 64"),
    (replace(GOOD, uid=-1), "uid = -1"),
    (replace(GOOD, uid=2**64), "uid = "),
    (replace(GOOD, uid=3), "uid = 3 is that of request 0 too"),
]


@pytest.mark.parametrize("bad, named", BAD_REQUESTS)
def test_a_malformed_request_is_refused_before_anything_runs(model, monkeypatch, bad, named):
    monkeypatch.setattr(_Run, "step", lambda self: pytest.fail("work began"))
    with pytest.raises(ValueError, match=f"request 1: .*{named}"):
        Engine(model).generate([Request((1,), 2, uid=3), bad], Sampling())


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(model, monkeypatch):
    monkeypatch.setattr(_Run, "step", lambda self: pytest.fail("work began"))
    capacity = Capacity(max_sequences=2, max_rows=8, pages=11, page_size=4)
    with pytest.raises(ValueError, match=r"request 1: .* need 12 pages of 4 positions; the engine has 11"):
        Engine(model, "dense", capacity).generate([GOOD, Request((1, 2), 15, uid=1)], Sampling())


@pytest.mark.parametrize("pages, named", [
    (2**70, "pages = 1180591620717411303424 must be below 2"), (2**31 - 1, "pages = 2147483647 of 2147483647 positions")])
def test_sizes_beyond_any_memory_are_refused_by_name(model, pages, named):
    """They ended in torch's TypeError about 10 arguments, or in an allocator's message that named no setting."""
    with pytest.raises(ValueError, match=named):
        Engine(model, "dense", Capacity(pages=pages, page_size=2**31 - 1)).generate([GOOD], Sampling())


def test_the_longest_text_the_model_takes(model):
    [done] = Engine(model, "exit:1").generate([Request((1, 2), 62, uid=1)], Sampling()).completions
    assert len(done.token_ids) == 62


def test_options_that_could_do_nothing_are_refused(model):
    with pytest.raises(ValueError, match="stop_ids holds 29"):
        Engine(model).generate([GOOD], Sampling(stop_ids=(0, 29)))
    with pytest.raises(ValueError, match="decode"):
        Engine(model).generate([GOOD], Sampling(stop_strings=("x",)))
    with pytest.raises(ValueError, match="from 1 to 3"):
        Engine(model, "exit:4")
    with pytest.raises(ValueError, match="not supported yet"):
        Engine(model, "draft:1,k=2")


def test_weights_that_are_not_finite_stop_the_run(model):
    broken = tiny_model(dtype=torch.float32)
    broken.weights["core.1.o"][0, 0] = math.nan
    with pytest.raises(RuntimeError, match="not finite"):
        Engine(broken, "exit:gate=0.5").generate([GOOD], Sampling())


def test_weights_published_during_a_run_are_refused():
    """Cells of two policy versions never meet; the next run starts from nothing."""
    model = tiny_model(dtype=torch.float32)
    run = _Run(Engine(model, "dense", SMALL), [GOOD], Sampling(), None)
    run.step()
    model.publish({name: 2 * weight for name, weight in model.weights.items()}, version=1)
    with pytest.raises(RuntimeError, match="policy version 0, the model is at 1"):
        run.step()
    rollout = Engine(model, "dense", SMALL).generate([GOOD], Sampling())
    assert rollout.header["policy_version"] == 1


def test_a_failed_run_leaves_nothing_behind(model):
    """A callback that raises in the middle: the same engine then gives what a new one gives."""
    asked = [Request(tuple(tokens(5, seed=i)), 3 + i, uid=i) for i in range(4)]
    shared = Engine(model, "exit:periodic=1,3", SMALL)

    def fail(done):
        raise KeyError("grader")

    with pytest.raises(KeyError):
        shared.generate(asked, Sampling(), fail)
    assert shared.generate(asked, Sampling()) == Engine(model, "exit:periodic=1,3", SMALL).generate(
        asked, Sampling())
