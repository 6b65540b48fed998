"""What makes rewards: the fields of a task, and sums with weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.scoring.functions import Scores
from agentrl.scoring.trace import Trace

RewardOfTrace = Callable[[Trace], Scores]


def field_of(trace: Trace, field: str) -> Any:
    """Return a field of the rollout's task; dots lead into objects.

    Raises:
        ValueError: the task has no such field, or it is null.
    """
    found: Any = trace.task
    for key in field.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None:
        known = ", ".join(map(str, trace.task)) or "none"
        raise ValueError(f"the task has no field {field!r} (there: {known})")
    return found


def expected_of(trace: Trace, field: str) -> list[Any]:
    """Return the right answers of a task: a list means any of its items."""
    found = field_of(trace, field)
    return found if isinstance(found, list) else [found]


def weighted(**parts: tuple[float, RewardOfTrace]) -> RewardOfTrace:
    """Make a reward of several: ``weighted(correct=(1.0, exact()), short=(0.1, length(400)))``.

    Each part becomes a reward of its name, multiplied by its weight; their sum counts. A part that
    gives several is named ``part.name``. A part that gives none is left out.

    Raises:
        ValueError: a part compares groups or is async; it is to be an entry of ``rewards`` itself.
    """
    for name, (_, reward) in parts.items():
        if getattr(reward, "compares_group", False) or inspect.iscoroutinefunction(reward):
            raise ValueError(
                f"weighted: {name} compares groups, as judges do, or is async; give it to "
                "--rewards by itself"
            )

    def score(trace: Trace) -> Scores:
        scores: dict[str, float] = {}
        for name, (weight, reward) in parts.items():
            result = reward(trace)
            if isinstance(result, Mapping):
                scores |= {f"{name}.{key}": weight * float(x) for key, x in result.items()}
            elif result is not None:
                scores[name] = weight * float(result)
        return scores or None

    return score
