from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.data.advantages import (
    ESTIMATORS,
    CreditSettings,
    GroupAdvantages,
    Scaling,
    discounted_returns,
    group_advantages,
    state_advantages,
    turn_advantages,
    whiten_groups,
)

NO, ZERO, SMALL = SkipReason.NO_REWARD, SkipReason.ZERO_ADVANTAGE, SkipReason.SMALL_GROUP
OK = None


@pytest.mark.parametrize(
    ("rewards", "options", "advantages", "skipped"),
    [
        # A member exactly at the mean still trains: it belongs to the step's normalization.
        ([1.0, 1.0, 0.0, 2.0], {}, [0.0, 0.0, -1.0, 1.0], [OK] * 4),
        ([1.0, 0.0, 0.0, 3.0], {}, [0.0, -1.0, -1.0, 2.0], [OK] * 4),
        ([1.0, None, 0.0], {}, [0.5, None, -0.5], [OK, NO, OK]),
        ([1.0, math.nan, 0.0], {}, [0.5, None, -0.5], [OK, NO, OK]),
        ([1.0, -math.inf, 0.0], {}, [0.5, None, -0.5], [OK, NO, OK]),
        ([0.7, 0.7, None], {}, [0.0, 0.0, None], [ZERO, ZERO, NO]),
        # Float noise is no variance, a small difference is.
        ([0.1 + 0.2, 0.3], {}, [0.0, 0.0], [ZERO, ZERO]),
        ([1e9 + 1e-7, 1e9], {}, [0.0, 0.0], [ZERO, ZERO]),
        ([0.1 + 0.2 - 0.3, 0.0], {}, [0.0, 0.0], [ZERO, ZERO]),
        ([1e-6, 0.0], {}, [5e-7, -5e-7], [OK, OK]),
        # Groups that shrank, and one member alone.
        ([1.0, None], {}, [0.0, None], [SMALL, NO]),
        ([1.0, 0.0, None], {"min_group": 3}, [0.0, 0.0, None], [SMALL, SMALL, NO]),
        ([None, None], {}, [None, None], [NO, NO]),
        ([], {}, [], []),
        ([1.0], {"min_group": 1}, [0.0], [SMALL]),
        ([1.0], {"min_group": 1, "estimator": "rloo"}, [0.0], [SMALL]),
        ([1.0, 0.0, 0.5], {"estimator": "rloo"}, [0.75, -0.75, 0.0], [OK] * 3),
        ([1.0, 0.0, None], {"estimator": "reinforce"}, [1.0, 0.0, None], [OK, ZERO, NO]),
        ([1.0], {"estimator": "reinforce"}, [1.0], [OK]),
        ([1, 0, 0, 0], {"estimator": "maxrl"}, [3.0, -1.0, -1.0, -1.0], [OK] * 4),
        # The rarer a success, the more it counts.
        ([1] + [0] * 7, {"estimator": "maxrl"}, [7.0] + [-1.0] * 7, [OK] * 8),
        ([0.0, 0.0], {"estimator": "maxrl"}, [0.0, 0.0], [ZERO, ZERO]),
        ([1.0, 0.0], {"estimator": "dr_grpo"}, [0.5, -0.5], [OK, OK]),
    ],
)
def test_a_group_by_hand(
    rewards: list[float | None], options: dict[str, Any], advantages: Any, skipped: Any
) -> None:
    found = group_advantages(rewards, CreditSettings(**options))
    assert found.advantages == [None if a is None else pytest.approx(a) for a in advantages]
    assert found.skipped == skipped


def test_maxrl_takes_no_negative_rewards() -> None:
    """One rollout that earns one does not end the run."""
    group = group_advantages([-1.0, 1.0, 0.0], CreditSettings(estimator="maxrl"))
    assert group.advantages == [None, 1.0, -1.0]
    assert group.skipped == [SkipReason.NO_REWARD, None, None]


rewards = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=9)


@given(rewards, st.sampled_from(sorted(ESTIMATORS)))
def test_every_member_has_one_fate(members: list[float | None], estimator: str) -> None:
    if estimator == "maxrl":
        members = [None if r is None else abs(r) for r in members]
    result = group_advantages(members, CreditSettings(estimator=estimator))
    assert len(result.advantages) == len(result.skipped) == len(members)
    for reward, advantage, reason in zip(members, result.advantages, result.skipped, strict=True):
        assert (reward is None) == (advantage is None) == (reason is NO)
        if reason in (ZERO, SMALL):
            assert advantage == 0.0


# ---- scaling, and the estimators against numpy


SCORES = [0.3, 1.0, 0.0, 0.7, 0.7]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_standard_deviation_has_a_named_ddof_and_epsilon(
    estimator: str, ddof: int, epsilon: float
) -> None:
    assert Scaling(1).divisor([3.0]) == 1.0  # one score has no deviation
    plain = CreditSettings(estimator=estimator)
    scaled = replace(plain, normalize_std=True, scaling=Scaling(ddof, epsilon))
    expected = np.array(group_advantages(SCORES, plain).advantages)
    expected = expected / (np.std(SCORES, ddof=ddof) + epsilon)
    assert group_advantages(SCORES, scaled).advantages == pytest.approx(list(expected))


def test_maxrl_follows_the_gradient_of_the_likelihood() -> None:
    """Over all outcomes of N draws of a Bernoulli policy with success probability p: the expected
    estimate is the gradient of the first N - 1 terms of log p = - sum of (1 - p)^k / k over k."""
    n, logit = 4, -0.8
    p = 1 / (1 + math.exp(-logit))
    expected = 0.0
    for outcome in itertools.product([0, 1], repeat=n):
        probability = math.prod(p if x else 1 - p for x in outcome)
        advantages = group_advantages(list(outcome), CreditSettings(estimator="maxrl")).advantages
        # d log pi / d logit is x - p
        estimate = sum(a * (x - p) for a, x in zip(advantages, outcome, strict=True)) / n
        expected += probability * estimate

    def series(at: float) -> float:
        q = 1 / (1 + math.exp(-at))
        return -sum((1 - q) ** k / k for k in range(1, n))

    h = 1e-5
    slope = (series(logit + h) - series(logit - h)) / (2 * h)
    assert expected == pytest.approx(slope, rel=1e-6)


def test_reinforce_pp_scales_over_the_step() -> None:
    groups = [
        group_advantages(r, CreditSettings(estimator="reinforce++"))
        for r in ([1.0, 0.0, None], [5.0, 5.0], [0.2, 0.4, 0.9], [3.0])
    ]
    done = whiten_groups(groups, Scaling(epsilon=0.0))
    centred = np.array([0.5, -0.5, *(np.array([0.2, 0.4, 0.9]) - 0.5)])
    expected = (centred - centred.mean()) / centred.std(ddof=1)
    found = [a for g in (done[0], done[2]) for a in g.advantages if a is not None]
    assert found == pytest.approx(list(expected))
    # What is skipped stays skipped, with 0, and had no part in the deviation.
    assert done[1] == GroupAdvantages([0.0, 0.0], [ZERO, ZERO])
    assert done[3] == GroupAdvantages([0.0], [SMALL])
    assert done[0].advantages[2] is None


# ---- by turn


def test_turns_are_compared_with_the_same_turn_of_others() -> None:
    found = turn_advantages(
        [[0.0, 1.0], [1.0, 0.0], None, [0.0, 0.0, 1.0]], CreditSettings(discount=0.5)
    )
    assert discounted_returns([0.0, 0.0, 1.0], 0.5) == [0.25, 0.5, 1.0]
    assert discounted_returns([], 0.5) == []
    first, second = np.mean([0.5, 1.0, 0.25]), np.mean([1.0, 0.0, 0.5])
    assert found.advantages[0] == pytest.approx([0.5 - first, 1.0 - second])
    assert found.advantages[1] == pytest.approx([1.0 - first, 0.0 - second])
    # No other member reached the third turn: the mean return from the start is its baseline.
    assert found.advantages[3] == pytest.approx([0.25 - first, 0.5 - second, 1.0 - first])
    assert found.advantages[2] == []
    assert found.skipped == [None, None, NO, None]


@pytest.mark.parametrize("normalize", [False, True])
def test_a_turn_of_one_member_teaches_where_totals_are_equal(normalize: bool) -> None:
    """It solved the task, took a useless turn and undid it; the other one solved it at once."""
    found = turn_advantages([[1.0, 1.0, -1.0], [1.0]], CreditSettings(normalize_std=normalize))
    assert found.advantages == [[0.0, -1.0, -2.0], [0.0]]
    assert found.skipped == [None, None]


@pytest.mark.parametrize("normalize", [False, True])
def test_one_turn_without_discount_and_without_common_states_is_grpo(normalize: bool) -> None:
    how = CreditSettings(normalize_std=normalize)
    expected = group_advantages(SCORES, how).advantages
    rewards, states = [[r] for r in SCORES], [[i] for i in range(len(SCORES))]
    for found in (turn_advantages(rewards, how), state_advantages(rewards, states, how)):
        assert [a for (a,) in found.advantages] == pytest.approx(expected)


def test_turn_groups_without_a_signal() -> None:
    exact = CreditSettings(normalize_std=True, scaling=Scaling(epsilon=0.0))
    for found in (
        turn_advantages([[1.0], [1.0]], exact), state_advantages([[1.0], [1.0]], [["s"]] * 2, exact)
    ):  # fmt: skip
        assert found.skipped == [ZERO, ZERO]
    same = turn_advantages([[0.0, 1.0], [0.0, 1.0]], CreditSettings())
    assert same.skipped == [ZERO, ZERO]
    # The same total, earned at different turns, does teach something.
    assert turn_advantages([[0.0, 1.0], [1.0, 0.0]], CreditSettings()).skipped == [None, None]
    alone = turn_advantages([[0.0, 1.0], None], CreditSettings())
    assert alone.skipped == [SMALL, NO]
    assert alone.advantages == [[0.0, 0.0], []]


def test_gigpo_by_hand() -> None:
    """Two rollouts meet in state "b"; the winner turned left there."""
    how = CreditSettings(discount=0.9, step_weight=0.5)
    states = [["a", "b"], ["a", "b", "c"]]
    won, lost = state_advantages([[0.0, 1.0], [0.0, 0.0, 0.0]], states, how).advantages
    a, b = 0.9 - 0.45, 1.0 - 0.5
    assert won == pytest.approx([0.5 + 0.5 * a, 0.5 + 0.5 * b])
    assert lost == pytest.approx([-0.5 - 0.5 * a, -0.5 - 0.5 * b, -0.5])  # only it saw "c"


turns = st.lists(
    st.one_of(st.none(), st.lists(st.floats(-10, 10), min_size=1, max_size=4)), max_size=6
)


@given(turns, st.floats(0, 1), st.booleans())
def test_turn_credit_is_whole(rewards: list, discount: float, normalize: bool) -> None:
    anchors = [[k % 2 for k, _ in enumerate(member or ())] for member in rewards]
    how = CreditSettings(discount=discount, normalize_std=normalize)
    for found in (turn_advantages(rewards, how), state_advantages(rewards, anchors, how)):
        judged = zip(rewards, found.advantages, found.skipped, strict=True)
        for member, advantages, reason in judged:
            assert len(advantages) == len(member or ())
            assert all(math.isfinite(a) for a in advantages)
            assert (reason is NO) == (member is None)
            if reason is not None:
                assert not any(advantages)
