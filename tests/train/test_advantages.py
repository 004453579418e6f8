import math
import random

import pytest

from train.advantages import group_advantages


def test_hand_worked_groups():
    """[1,0,0,0]: mean 1/4, sample variance (9/16 + 3/16)/3 = 1/4. [1,1,0,0]: mean 1/2, sample variance 1/3."""
    result = group_advantages([1, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4, "group", epsilon=0.0)
    half = 0.5 / math.sqrt(1 / 3)
    assert result.values[:4] == (1.5, -0.5, -0.5, -0.5)
    assert result.values[4:] == pytest.approx((half, half, -half, -half), abs=1e-15)
    assert result.within_group_std == pytest.approx((0.5 + math.sqrt(1 / 3)) / 2, abs=1e-15)
    assert (result.groups, result.zero_variance, result.unscored_groups) == (2, 0.0, 0)


def test_epsilon_is_added_to_the_deviation():
    assert group_advantages([1, 0, 0, 0], "aaaa").values[0] == 0.75 / (0.5 + 1e-6)


def test_none_subtracts_the_mean_and_divides_by_nothing():
    result = group_advantages([1, 0, 0, 0, 4, 0, 0, 0], [7] * 4 + [8] * 4, "none")
    assert result.values == (0.75, -0.25, -0.25, -0.25, 3.0, -1.0, -1.0, -1.0)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    """[1,0,0,0]: 1 - 0, 0 - 1/3. [4,1]: 4 - 1, 1 - 4. [3,1,1]: 3 - 1, 1 - 2; nothing is divided."""
    result = group_advantages([1, 0, 0, 0, 4, 1, 3, 1, 1], [0] * 4 + [1] * 2 + [2] * 3, "leave-one-out")
    assert result.values[:4] == (1.0, -1 / 3, -1 / 3, -1 / 3)
    assert result.values[4:] == (3.0, -3.0, 2.0, -1.0, -1.0)
    assert result.within_group_std == group_advantages([1, 0, 0, 0, 4, 1, 3, 1, 1], "aaaabbccc").within_group_std


def test_leave_one_out_counts_scored_samples_only():
    """Others of the sample with 2.0: 0.0 and 1.0, not the unscored ones."""
    result = group_advantages([2.0, None, 0.0, math.nan, 1.0], [0] * 5, "leave-one-out")
    assert result.values == (1.5, 0.0, -1.5, 0.0, 0.0) and result.scored == (True, False, True, False, True)
    alone = group_advantages([None, 3.0, math.nan, 7.0], [0, 0, 0, 1], "leave-one-out")
    assert alone.values == (0.0,) * 4 and (alone.groups, alone.zero_variance) == (2, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_leave_one_out_against_its_definition(seed):
    """Any number of samples, members in any order; equal rewards exactly 0, the sum of a group 0."""
    generator = random.Random(seed)
    rewards = [generator.choice((None, 0.1, 0.7, generator.uniform(-3, 9))) for _ in range(generator.randint(1, 12))]
    values = group_advantages(rewards, [0] * len(rewards), "leave-one-out").values
    scored = [r for r in rewards if r is not None]
    for index, reward in enumerate(rewards):
        others = [r for i, r in enumerate(rewards) if i != index and r is not None]
        wanted = 0.0 if reward is None or not others else reward - math.fsum(others) / len(others)
        assert values[index] == pytest.approx(wanted, abs=1e-14)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-13)
    assert len(set(scored)) != 1 or set(values) == {0.0}


def test_unscored_rewards_are_left_out_and_zero_is_a_reward():
    result = group_advantages([1, None, 0.0, math.nan], [0] * 4, "none")
    assert result.values == (0.5, 0.0, -0.5, 0.0)
    assert result.scored == (True, False, True, False)


def test_one_scored_sample_gives_zero():
    result = group_advantages([None, 3.0, math.nan], [0, 0, 0])
    assert result.values == (0.0, 0.0, 0.0)
    assert (result.groups, result.zero_variance, result.within_group_std) == (1, 1.0, 0.0)


def test_a_group_without_scores_enters_no_statistic():
    result = group_advantages([None, None, 1.0, 0.0], ["x", "x", "y", "y"])
    assert (result.groups, result.unscored_groups, result.zero_variance) == (1, 1, 0.0)
    assert result.within_group_std == math.sqrt(0.5)
    nothing = group_advantages([None, None], [0, 0])
    assert (nothing.groups, nothing.zero_variance, nothing.within_group_std) == (0, 0.0, 0.0)


def test_equal_rewards_give_exact_zero_where_the_mean_does_not():
    """The rounded mean of ten times 0.1 and of three times 0.1 is not 0.1; a std threshold would not
    tell this from a group whose rewards really differ by 1e-12."""
    assert group_advantages([0.1] * 3 + [5.7] * 7, [0] * 3 + [1] * 7).values == (0.0,) * 10
    assert group_advantages([0.1] * 3, [0] * 3).zero_variance == 1.0
    tiny = group_advantages([0.0, 1e-12], [0, 0], "group", epsilon=0.0)
    assert tiny.zero_variance == 0.0 and tiny.values == pytest.approx((-math.sqrt(0.5), math.sqrt(0.5)))


def test_groups_may_interleave_and_ids_are_compared_whole():
    result = group_advantages([1, 10, 0, 30], [("a", 0), ("b", 0), ("a", 0), ("b", 0)], "none")
    assert result.values == (0.5, -10.0, -0.5, 10.0)


def test_order_of_members_does_not_change_bits():
    rewards = [0.1, 0.7, 1e-9, 12.3, 0.30000000000000004]
    forward = group_advantages(rewards, [0] * 5).values
    assert group_advantages(rewards[::-1], [0] * 5).values == forward[::-1]


@pytest.mark.parametrize(
    "arguments, word",
    [
        (([1.0], [0, 0]), "groups"),
        (([1.0, 2.0], [0, 0], "batch"), "advantage is 'batch': use one of group, none, leave-one-out"),
        (([math.inf, 1.0], [0, 0]), "rewards[0]"),
    ],
)
def test_refusals_name_the_culprit(arguments, word):
    with pytest.raises(ValueError) as caught:
        group_advantages(*arguments)
    assert word in str(caught.value)
