"""When a text ends, on verified tokens only."""

import pytest

from engine.sampler import Sampling
from engine.stopping import Stopper, shown_text

PIECES = ["", "a", "b", "Que", "stion", ":", "Question:", "x Question: y", "\n"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def first_stop(response, sampling, limit=1000):
    """Length and reason at which a stream of tokens ends; None where it does not."""
    stopper = Stopper(sampling, decode)
    for length in range(1, len(response) + 1):
        reason = stopper.reason(response[:length], limit)
        if reason is not None:
            return length, reason
    return None


def test_every_stop_id_fires_and_others_do_not():
    """Configs name different eos ids: the union stops."""
    sampling = Sampling(stop_ids=(2, 8))
    assert first_stop([1, 1, 2, 1], sampling) == (3, "stop")
    assert first_stop([1, 8], sampling) == (2, "stop")
    assert first_stop([1, 3, 4], sampling) is None


def test_a_stop_string_over_several_tokens_keeps_the_one_that_completes_it():
    sampling = Sampling(stop_strings=("Question:",))
    assert first_stop([1, 3, 4, 5, 1], sampling) == (4, "stop_string")
    assert first_stop([1, 3, 4, 1, 5], sampling) is None
    assert first_stop([6, 1], sampling) == (1, "stop_string")
    assert first_stop([1, 7], sampling) == (2, "stop_string")


def test_a_long_text_before_the_stop_string_changes_nothing():
    """Only the last tokens are decoded; tokens without text do not push the stop string out."""
    sampling = Sampling(stop_strings=("Question:",))
    assert first_stop([1] * 500 + [3, 4, 5], sampling) == (503, "stop_string")
    assert first_stop([1] * 90 + [3] + [0] * 20 + [4, 5], sampling) == (113, "stop_string")


def test_length_and_precedence():
    """A stop id at the last allowed token is a stop, not a length."""
    sampling = Sampling(stop_ids=(8,), stop_strings=("ab",))
    assert first_stop([1, 1, 8], sampling, limit=3) == (3, "stop")
    assert first_stop([1, 1, 2], sampling, limit=3) == (3, "stop_string")
    assert first_stop([1, 1, 1], sampling, limit=3) == (3, "length")
    assert first_stop([1, 1, 1], sampling, limit=1) == (1, "length")


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="decode"):
        Stopper(Sampling(stop_strings=("a",)), None)
    assert Stopper(Sampling(stop_ids=(1,)), None).reason([1], 5) == "stop"


def test_only_the_shown_text_is_cut():
    assert shown_text("4\nQuestion: 5 Q", (" 5", "Question:")) == "4\n"
    assert shown_text("no stop", ("Question:",)) == "no stop"
    assert shown_text("no stop", ()) == "no stop"
