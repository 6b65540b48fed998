"""Call an estimator that a user wrote: ``algorithm.estimator = "my_module:advantages"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentrl_trainer.data.advantages import TurnAdvantages
from agentrl_trainer.data.members import Member
from agentrl_trainer.data.skip_reasons import group_reason, member_reason
from agentrl_trainer.own_function import FunctionError, said_by

OwnEstimator: TypeAlias = Callable[
    [list[float], list[Member]], Sequence[float] | Sequence[Sequence[float]]
]
"""``(rewards, members) -> advantages``: the sums of the rewards of a group's members that have any,
and these members. It returns a number for each member, or a list with one for each of its
``turns``."""


def own_advantages(
    group: Sequence[Member], estimator: OwnEstimator, min_group: int
) -> TurnAdvantages:
    """Have an estimator compare the members of one group that have a reward.

    A group of fewer than ``min_group`` members with a reward is skipped, as is one all of whose
    advantages are 0.

    Raises:
        FunctionError: the estimator raised, or returned something else.
    """
    scored = [member for member in group if member.total is not None]
    values = _checked(scored, estimator) if len(scored) >= max(min_group, 1) else []
    teaches = any(map(any, values))
    reason = group_reason(len(scored), min_group, compares=min_group > 1, teaches=teaches)
    given = iter(values)
    return TurnAdvantages(
        [
            [0.0] * len(member.turns) if reason or member.total is None else next(given)
            for member in group
        ],
        [member_reason(member.total, reason) for member in group],
    )


def _checked(scored: Sequence[Member], estimator: OwnEstimator) -> list[list[float]]:
    """Return an advantage for each turn of each member."""
    rewards = [member.total for member in scored if member.total is not None]
    with said_by(estimator, "algorithm.estimator"):
        values = list(estimator(rewards, list(scored)))
        if len(values) != len(scored):
            raise FunctionError(f"it returned {len(values)} values for {len(scored)} members")
        done = [_turns(x, len(m.turns)) for x, m in zip(values, scored, strict=True)]
        for at, (member, turns) in enumerate(zip(scored, done, strict=True), start=1):
            if len(turns) != len(member.turns):
                said = f"{len(turns)} numbers for the {len(member.turns)} turns of member {at}"
                raise FunctionError(f"it returned {said}")
            if not all(map(math.isfinite, turns)):
                raise FunctionError(f"it returned {turns} for member {at}, which is not finite")
        return done


def _turns(value: object, count: int) -> list[float]:
    """Read a number, or a list with one for each turn; also numpy's and torch's."""
    if isinstance(value, Sequence) or getattr(value, "ndim", 0):
        return [float(one) for one in value]  # type: ignore[union-attr]
    return [float(value)] * count  # type: ignore[arg-type]
