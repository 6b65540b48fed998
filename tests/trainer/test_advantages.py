from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.advantages import ESTIMATORS, group_advantages

NO, ZERO, SMALL = SkipReason.NO_REWARD, SkipReason.ZERO_ADVANTAGE, SkipReason.SMALL_GROUP


def test_grpo_is_centred_and_not_scaled() -> None:
    result = group_advantages([1.0, 0.0, 0.0, 3.0])
    assert result.advantages == [0.0, -1.0, -1.0, 2.0]
    # A member exactly at the mean still trains: it belongs to the step's normalisation.
    assert result.skipped == [None] * 4


def test_missing_is_not_zero() -> None:
    result = group_advantages([1.0, None, 0.0])
    assert result.advantages == [0.5, None, -0.5]
    assert result.skipped == [None, NO, None]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_missing(broken: float) -> None:
    assert group_advantages([1.0, broken, 0.0]).advantages == [0.5, None, -0.5]


def test_without_variance_the_group_is_skipped() -> None:
    result = group_advantages([0.7, 0.7, None])
    assert result.advantages == [0.0, 0.0, None]
    assert result.skipped == [ZERO, ZERO, NO]


def test_float_noise_is_not_variance() -> None:
    assert group_advantages([0.1 + 0.2, 0.3]).skipped == [ZERO, ZERO]
    assert group_advantages([1e9 + 1e-7, 1e9]).skipped == [ZERO, ZERO]
    assert group_advantages([0.1 + 0.2 - 0.3, 0.0]).skipped == [ZERO, ZERO]


def test_a_small_difference_is_variance() -> None:
    assert group_advantages([1e-6, 0.0]).skipped == [None, None]


def test_a_group_that_shrank() -> None:
    assert group_advantages([1.0, None]).skipped == [SMALL, NO]
    assert group_advantages([1.0, None]).advantages == [0.0, None]
    assert group_advantages([1.0, 0.0, None], min_group=3).skipped == [SMALL, SMALL, NO]
    assert group_advantages([None, None]).skipped == [NO, NO]
    assert group_advantages([]).advantages == []


def test_one_alone_has_no_baseline_whatever_min_group_says() -> None:
    for name in ("grpo", "rloo"):
        assert group_advantages([1.0], estimator=name, min_group=1).skipped == [SMALL]


def test_normalize_std_divides_by_the_sample_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    plain = group_advantages(rewards).advantages
    scaled = group_advantages(rewards, normalize_std=True).advantages
    deviation = statistics.stdev(rewards)
    assert scaled == pytest.approx([a / deviation for a in plain if a is not None])


def test_rloo_leaves_itself_out() -> None:
    rewards = [1.0, 0.0, 0.5, 3.0]
    expected = [r - statistics.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, estimator="rloo").advantages == pytest.approx(expected)


def test_reinforce_is_the_reward() -> None:
    result = group_advantages([1.0, 1.0, 0.0, None], estimator="reinforce")
    assert result.advantages == [1.0, 1.0, 0.0, None]
    assert result.skipped == [None, None, ZERO, NO]
    assert group_advantages([1.0], estimator="reinforce").skipped == [None]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown estimator 'gpro'.*grpo"):
        group_advantages([1.0], estimator="gpro")
    with pytest.raises(ValueError, match="normalize_std"):
        group_advantages([1.0], estimator="reinforce", normalize_std=True)


rewards = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=9)


@given(rewards, st.sampled_from(sorted(ESTIMATORS)))
def test_every_member_has_one_fate(members: list[float | None], estimator: str) -> None:
    result = group_advantages(members, estimator=estimator)
    assert len(result.advantages) == len(result.skipped) == len(members)
    for reward, advantage, reason in zip(members, result.advantages, result.skipped, strict=True):
        assert (reward is None) == (advantage is None) == (reason is NO)
        if reason in (ZERO, SMALL):
            assert advantage == 0.0


@given(rewards)
def test_grpo_sums_to_zero(members: list[float | None]) -> None:
    advantages = [a for a in group_advantages(members).advantages if a is not None]
    assert abs(math.fsum(advantages)) <= 1e-9 * max([1.0, *map(abs, advantages)])
