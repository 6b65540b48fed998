"""Which tasks a training draws, and how often."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.config.field_types import (
    Count,
    NonNegative,
    Share,
    Table,
    choice_or_function,
    from_json,
)

Pool = tuple[Share, NonNegative]
"""The highest success rate of its tasks, and its share of the draws."""


def check_pools(pools: list[Pool]) -> list[Pool]:
    bounds = [bound for bound, _ in pools]
    if bounds and (bounds != sorted(set(bounds)) or bounds[-1] != 1):
        raise ValueError("the bounds must rise, and the last one must be 1")
    return pools


Pools = Annotated[list[Pool], BeforeValidator(from_json), AfterValidator(check_pools)]


Weights = Annotated[str, AfterValidator(partial(choice_or_function, ["uncertain"]))]


class CurriculumSettings(Table):
    """Which tasks come next, by how often their rollouts succeeded. Without any of these settings
    each epoch goes through all tasks, shuffled; a generator's tasks come in its order."""

    weights: Weights | None = None
    """Draw tasks by a weight: uncertain is p (1 - p) of the success rate p; or module:function of
    (task, p)."""
    pools: Pools = Field(default_factory=list[Pool])
    """Pools of tasks by success rate, each with its upper bound and share of the draws: [[0.2, 1],
    [0.8, 3], [1, 1]] draws three fifths from those with rates of 0.2 to 0.8."""
    solved: Share | None = None
    """Drop tasks whose success rate over the last window groups is at least this. The run ends
    where no task is left."""
    window: Count = 4
    """Groups of a task over which its success rate is computed. As p it begins at one half: (won +
    1) / (rollouts + 2)."""
