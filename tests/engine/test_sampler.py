"""Keyed Gumbel-max sampling: the right distribution, the documented ties, every bit of the key."""

import math

import pytest
import torch

from engine.philox import philox, split64
from engine.sampler import Sampling, gumbel_noise, sample, truncated

CPU = torch.device("cpu")
VOCAB = 10  # no multiple of 4: the last vocabulary block is used in part


def draw(logits, sampling, uids=None, positions=None):
    """ids and log-probs as lists; by default row i has uid i and position 3."""
    count = logits.shape[0]
    ids, logprobs = sample(logits, sampling, list(range(count)) if uids is None else uids,
                           [3] * count if positions is None else positions)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    return ids.tolist(), logprobs.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("vary", ["uid", "position"])
def test_chi_square_of_20000_draws(temperature, vary):
    """Against softmax(logits / temperature); 27.88 is the 0.1 % point at 9 degrees of freedom.

    The logits are chosen so that the draws of the other temperature fail (checked below).
    """
    logits = torch.tensor([1.5, -0.5, 0.0, 0.75, -2.0, 0.25, 1.0, -1.0, 0.5, -0.25])
    count = 20_000
    many, fixed = list(range(count)), [7] * count
    uids, positions = (many, fixed) if vary == "uid" else (fixed, many)
    ids, _ = draw(logits.expand(count, -1), Sampling(seed=1234, temperature=temperature), uids, positions)
    observed = torch.bincount(torch.tensor(ids), minlength=VOCAB).double()

    def chi_square(at):
        expected = torch.softmax(logits.double() / at, -1) * count
        assert expected.min() > 50
        return ((observed - expected) ** 2 / expected).sum().item()

    assert chi_square(temperature) < 27.88
    assert chi_square(1.7 - temperature) > 200


def test_noise_is_the_documented_function_of_key_position_and_token():
    """-log(-log((x + 0.5) 2^-32)), x = word token % 4 of block token // 4."""
    seed, uid, position = 2**40 + 5, 2**50 + 6, 77
    noise = gumbel_noise(seed, [1, uid], [2, position], VOCAB, CPU)
    assert noise.shape == (2, VOCAB) and noise.dtype == torch.float64
    for token in range(VOCAB):
        words = philox((*split64(uid), position, token // 4), split64(seed))
        uniform = (words[token % 4] + 0.5) / 2**32
        assert noise[1, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 21])
def test_noise_of_a_token_does_not_depend_on_vocabulary_or_company(vocab):
    full = gumbel_noise(9, [3, 4, 5], [6, 7, 8], 24, CPU)
    assert torch.equal(gumbel_noise(9, [3, 4, 5], [6, 7, 8], vocab, CPU), full[:, :vocab])
    assert torch.equal(gumbel_noise(9, [4], [7], vocab, CPU)[0], full[1, :vocab])


def test_every_word_of_seed_and_uid_and_the_position_matter():
    """Seeds 1 and 1 + 2^32 once gave one stream in engines that seed a CPU generator."""
    base = gumbel_noise(1, [2], [3], 8, CPU)
    for seed, uid, position in ((1 + 2**32, 2, 3), (2**63 + 1, 2, 3), (1, 2 + 2**32, 3),
                                (1, 2 + 2**63, 3), (1, 2, 4), (2, 2, 3), (1, 1, 3), (1, 3, 2)):
        assert not (gumbel_noise(seed, [uid], [position], 8, CPU) == base).any()


def test_extreme_words_give_finite_noise():
    """u = (x + 0.5) 2^-32 is never 0 or 1, so the noise is never infinite."""
    uniform = (torch.tensor([0.0, 2.0**32 - 1], dtype=torch.float64) + 0.5) * 2.0**-32
    assert torch.isfinite(-(-uniform.log()).log()).all()
    noise = gumbel_noise(3, list(range(50)), [0] * 50, 4000, CPU)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01  # Euler's constant, 200,000 draws


def test_greedy_and_ties_take_the_lowest_id():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -2.0, -1.0]])
    ids, logprobs = draw(logits, Sampling(greedy=True))
    assert ids == [1, 0, 0]
    assert logprobs[1] == pytest.approx(math.log(1 / 4), rel=1e-6)


def test_greedy_needs_no_noise_and_ignores_the_key():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    first = draw(logits, Sampling(seed=1, greedy=True))
    assert first == draw(logits, Sampling(seed=2, greedy=True), uids=[9] * 5, positions=[1] * 5)
    assert first[0] == logits.argmax(-1).tolist()


def test_sampled_ties_take_the_lowest_id(monkeypatch):
    """Equal scores after the noise was added, as two identical head rows with equal noise give."""
    monkeypatch.setattr("engine.sampler.gumbel_noise",
                        lambda *key: torch.zeros(2, 4, dtype=torch.float64))
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert draw(logits, Sampling())[0] == [1, 0]


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.0, 1.7])
def test_logprob_is_that_of_the_tempered_softmax(temperature):
    """Not the log-prob before the temperature, nor that one divided by it."""
    logits = 2 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    ids, logprobs = draw(logits, Sampling(seed=3, temperature=temperature))
    chosen = torch.tensor(ids)[:, None]
    right = torch.log_softmax(logits.double() / temperature, -1).gather(-1, chosen)[:, 0]
    assert torch.allclose(torch.tensor(logprobs).double(), right, atol=1e-6)
    if temperature != 1.0:
        plain = torch.log_softmax(logits.double(), -1).gather(-1, chosen)[:, 0]
        for wrong in (plain, plain / temperature):
            assert (torch.tensor(logprobs).double() - wrong).abs().max() > 0.1


def test_float64_logits_give_float32_logprobs_too():
    """A recorded log-prob has one width, whatever the model's."""
    logits = torch.randn(6, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    draw(logits, Sampling())


def test_temperature_divides_the_logits_and_not_the_noise():
    """A token 8 nats ahead at temperature 0.1 is 80 ahead: never beaten. At 8 it is 1 ahead."""
    logits = torch.tensor([[8.0, 0.0]]).expand(300, -1)
    cold, _ = draw(logits, Sampling(seed=1, temperature=0.1))
    warm, _ = draw(logits, Sampling(seed=1, temperature=8.0))
    assert sum(cold) == 0
    assert 40 < sum(warm) < 130  # share 1 / (1 + e) = 0.27 of 300


def test_a_group_with_one_seed_gets_distinct_samples():
    logits = torch.zeros(8, 50)
    ids, _ = draw(logits, Sampling(seed=1))
    assert len(set(ids)) > 4


# ---- truncation ----


def kept(scores, top_k=0, top_p=1.0):
    """Ids that stay, of one row; those that do keep their scores."""
    row = torch.tensor([scores])
    found = truncated(row, top_k, top_p)
    stay = torch.isfinite(found)
    assert torch.equal(found[stay], row[stay]) and (found[~stay] == -math.inf).all()
    return torch.nonzero(stay[0])[:, 0].tolist()


TENTHS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def test_truncation_by_hand():
    """Down from the likeliest: 0.4, 0.3, 0.2, 0.1, so before them stand 0, 0.4, 0.7 and 0.9."""
    assert [kept(TENTHS, top_k=k) for k in (1, 2, 3, 4, 9)] == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    found = [kept(TENTHS, top_p=p) for p in (1e-9, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 1.0)]
    assert found == [[1], [1], [1, 3], [1, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_top_p_counts_the_probability_of_what_top_k_left():
    """Of 0.4 and 0.3 the first has 0.571 of what is left, enough for 0.5; of all tokens it has 0.4, not enough."""
    assert kept(TENTHS, top_p=0.5) == [1, 3]
    assert kept(TENTHS, top_k=2, top_p=0.5) == [1]


def test_equal_tokens_at_the_edge_stay_from_the_lowest_id_up():
    assert kept([2.0, 1.0, 2.0, 2.0], top_k=2) == [0, 2]
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]  # a quarter each, exactly: two reach a half
    assert kept([0.0] * 4, top_p=0.5000001) == [0, 1, 2]
    assert kept([0.0] * 40, top_k=3) == [0, 1, 2]


def test_the_temperature_comes_before_the_truncation():
    """At temperature 1/2 probabilities are squared: 0.16 of 0.3 is 0.533, so top-p 0.5 keeps one token, not two."""
    ids, _ = draw(torch.tensor([TENTHS]).expand(300, -1), Sampling(seed=1, temperature=0.5, top_p=0.5))
    assert set(ids) == {1}
    ids, _ = draw(torch.tensor([TENTHS]).expand(300, -1), Sampling(seed=1, top_p=0.5))
    assert set(ids) == {1, 3}


def plainly_kept(scores, top_k, top_p):
    """The definition token by token."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k or len(scores)]
    shares = [math.exp(scores[i] - scores[order[0]]) for i in order]
    before, found = 0.0, []
    for i, share in zip(order, shares, strict=True):
        if before < top_p * math.fsum(shares):
            found.append(i)
        before += share
    return sorted(found)


@pytest.mark.parametrize("top_k, top_p", [(0, 0.313), (0, 0.871), (3, 1.0), (7, 0.613), (2, 0.999)])
def test_truncation_against_the_definition(top_k, top_p):
    """Whole-numbered logits: many tokens are equal."""
    rows = torch.randint(-3, 4, (200, 13), generator=torch.Generator().manual_seed(7)).float()
    found = torch.isfinite(truncated(rows, top_k, top_p))
    for row, stay in zip(rows.tolist(), found, strict=True):
        assert torch.nonzero(stay)[:, 0].tolist() == plainly_kept(row, top_k, top_p)


def test_a_row_is_truncated_the_same_in_any_company():
    rows = torch.randn(9, 301, generator=torch.Generator().manual_seed(8))
    whole = truncated(rows, 40, 0.8)
    assert all(torch.equal(truncated(rows[i:i + 1], 40, 0.8)[0], whole[i]) for i in range(9))


def test_chi_square_of_truncated_draws():
    """Against the renormalised rest; 18.47 is the 0.1 % point at 4 degrees of freedom."""
    logits = torch.tensor([1.5, -0.5, 0.0, 0.75, -2.0, 0.25, 1.0, -1.0, 0.5, -0.25])
    count = 20_000
    ids, _ = draw(logits.expand(count, -1), Sampling(seed=99, top_k=6, top_p=0.92))
    share = torch.where(torch.isin(torch.arange(VOCAB), torch.tensor([0, 3, 5, 6, 8])), logits.double().exp(), 0.0)
    assert set(ids) == {0, 3, 5, 6, 8}  # top-k leaves six, top-p drops the last of them, id 2
    expected = share / share.sum() * count
    observed = torch.bincount(torch.tensor(ids), minlength=VOCAB).double()
    live = expected > 0
    assert ((observed - expected)[live] ** 2 / expected[live]).sum().item() < 18.47


def test_a_surviving_token_is_drawn_by_the_same_noise():
    """Truncation changes no draw but those that it drops: evaluations with and without are paired."""
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(5))
    plain, _ = draw(logits, Sampling(seed=4))
    short, _ = draw(logits, Sampling(seed=4, top_k=15, top_p=0.9))
    stays = torch.isfinite(truncated(logits, 15, 0.9))[torch.arange(500), torch.tensor(plain)].tolist()
    assert 250 < sum(stays) < 500
    assert all(one == other for one, other, same in zip(plain, short, stays, strict=True) if same)
    assert all(one != other for one, other, same in zip(plain, short, stays, strict=True) if not same)


def test_truncation_records_the_log_prob_of_the_full_softmax():
    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(6))
    ids, logprobs = draw(logits, Sampling(seed=4, temperature=0.8, top_k=5, top_p=0.7))
    full = torch.log_softmax(logits / 0.8, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.equal(torch.tensor(logprobs), full)


def test_a_person_reads_what_is_in_force():
    assert Sampling(seed=3, temperature=0.8, top_k=5, top_p=0.7, stop_ids=(2,)).describe() == (
        "temperature 0.8, top-k 5, top-p 0.7 (log-probs of the full softmax), no penalties, seed 3, stop ids [2], "
        "stop strings []")
    assert Sampling().describe().startswith("temperature 1.0, no top-k, no top-p, no penalties, seed 0")
    assert Sampling(greedy=True).describe().startswith("greedy (log-probs at temperature 1), no penalties")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_are_refused(bad, greedy):
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = bad
    with pytest.raises(RuntimeError, match="not finite"):
        draw(logits, Sampling(greedy=greedy))


def test_a_temperature_that_overflows_the_logits_is_refused():
    """Finite logits over 1e-40 are infinite in float32; the log-probability would be NaN."""
    with pytest.raises(RuntimeError, match=r"temperature = 1e-40"):
        draw(torch.ones(1, VOCAB), Sampling(temperature=1e-40))


REFUSED = [
    ({"seed": -1}, "seed = -1"), ({"seed": 2**64}, "seed = "), ({"seed": 1.5}, "seed = 1.5"),
    ({"seed": True}, "seed = True"),
    ({"temperature": 0}, "temperature = 0"), ({"temperature": -1.0}, "temperature = -1.0"),
    ({"temperature": math.inf}, "temperature = inf"), ({"temperature": math.nan}, "temperature = nan"),
    ({"top_k": -1}, "top_k = -1"), ({"top_k": 5.0}, "top_k = 5.0"), ({"top_k": True}, "top_k = True"),
    ({"top_p": 0.0}, "top_p = 0.0"), ({"top_p": 1.1}, "top_p = 1.1"), ({"top_p": math.nan}, "top_p = nan"),
    ({"top_k": 2, "greedy": True}, "most likely token: leave them out"),
    ({"top_p": 0.5, "greedy": True}, "top_p = 0.5 change nothing"),
    ({"stop_ids": (3, -1)}, "stop_ids holds -1"), ({"stop_ids": ("2",)}, "stop_ids holds '2'"),
    ({"stop_strings": ("a", "")}, "empty text"), ({"stop_strings": "Question:"}, "must be a tuple"),
]


@pytest.mark.parametrize("fields, named", REFUSED)
def test_sampling_refuses_impossible_values_by_name(fields, named):
    with pytest.raises(ValueError, match=named.replace("(", "\\(")):
        Sampling(**fields)
