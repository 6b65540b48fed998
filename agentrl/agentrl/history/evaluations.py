"""The evaluations of a run: success by step, by task and by field of the tasks, and what flipped.

Reads the run's index. A rollout is a success if its reward is at least
``evaluation.success_reward`` of the run's configuration; one without a reward is none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from agentrl.config.setting_names import recorded
from agentrl.history.sources import OpenRun
from agentrl.runs.statistics import Estimate, interval_of_sums, paired_p_value, pass_estimates
from agentrl_tracer.schemas import Json

_MOST_VALUES = 20
"""Different values of a field that are shown one by one; numbers beyond are shown in quarters."""
NO_VALUE = "none"
_COUNTED = "purpose = 'eval' AND status != 'cancelled'"
_BY_TASK = f"""
SELECT task, coalesce(sum(reward >= ?), 0) AS successes, sum(final) AS samples, min(id) AS rollout
FROM rollout WHERE {_COUNTED} AND step = ? GROUP BY task HAVING sum(final) > 0
"""
_BY_STEP = f"""
SELECT step, count(*) AS tasks, min(samples) AS samples, sum(open) AS open, sum(share) AS total,
       sum(share * share) AS squares, sum(earned) AS earned, sum(rewarded) AS rewarded
FROM (
  SELECT step, sum(final) AS samples, sum(final = 0) AS open,
         coalesce(sum(reward >= ?), 0) / max(sum(final), 1.0) AS share,
         sum(reward) AS earned, count(reward) AS rewarded
  FROM rollout WHERE {_COUNTED} GROUP BY step, task
) GROUP BY step ORDER BY step
"""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation in sum."""

    step: int
    tasks: int
    samples: int
    """Of each task."""
    success: Estimate
    """With tasks as the independent units."""
    reward: float | None
    """Mean of the rollouts that have one."""
    under_way: int
    """Rollouts that have not ended; they are no successes yet."""


@dataclass(frozen=True)
class Outcome:
    """How one task went in one evaluation."""

    task: int
    """The task's place in its split."""
    successes: int
    samples: int
    rollout: str
    """The id of its first."""

    @property
    def share(self) -> Fraction:
        return Fraction(self.successes, self.samples)

    @property
    def passed(self) -> bool:
        """At least half of its samples succeeded."""
        return 2 * self.successes >= self.samples


@dataclass(frozen=True)
class Flip:
    """A task that passed in one of two evaluations only."""

    before: Outcome
    after: Outcome


@dataclass(frozen=True)
class Paired:
    """Two evaluations on the tasks that both have."""

    tasks: int
    before: Estimate
    after: Estimate
    p_value: float
    """By ``runs.statistics.paired_p_value``."""
    gained: list[Flip]
    lost: list[Flip]

    @property
    def difference(self) -> float:
        return self.after.rate - self.before.rate


def success_reward(run: OpenRun) -> float:
    """Return the reward from which on a rollout of the run is a success."""
    return float(recorded(run.row["config"], "evaluation.success_reward", 1.0))


def evaluations(run: OpenRun) -> list[Evaluation]:
    """Return the run's evaluations, steps ascending; those of no finished rollout are left out."""
    with run.index.read() as db:
        rows = db.execute(_BY_STEP, [success_reward(run)]).fetchall()
    return [
        Evaluation(
            step=row["step"],
            tasks=row["tasks"],
            samples=row["samples"],
            success=Estimate(
                row["total"] / row["tasks"],
                *interval_of_sums(row["tasks"], row["total"], row["squares"], row["samples"]),
            ),
            reward=row["earned"] / row["rewarded"] if row["rewarded"] else None,
            under_way=row["open"],
        )
        for row in rows
        if row["samples"]
    ]


def outcomes(run: OpenRun, step: int) -> dict[int, Outcome]:
    """Return how each task went in the evaluation of a step, by the task's place in its split."""
    with run.index.read() as db:
        rows = db.execute(_BY_TASK, [success_reward(run), step])
        return {row["task"]: Outcome(**dict(row)) for row in rows}


def split_of(run: OpenRun) -> str:
    """Return the split that the run's evaluations are of: ``eval``, or that of the command."""
    return "eval" if run.row["kind"] == "train" else run.row["kind"]


def evaluated_tasks(run: OpenRun) -> list[Json]:
    """Return the data of the tasks that the run evaluates, in order."""
    return run.store.tasks(run.id, split_of(run))


def pass_at(found: Mapping[Any, Outcome]) -> dict[int, Estimate]:
    """Return pass@k with intervals, by k."""
    return pass_estimates([(one.successes, one.samples) for one in found.values()])


def pair(before: Mapping[Key, Outcome], after: Mapping[Key, Outcome]) -> Paired | None:
    """Compare two evaluations on the tasks whose keys both have; None without any."""
    common = [key for key in before if key in after]
    if not common:
        return None
    flips = [Flip(before[key], after[key]) for key in common]
    changes = [flip.after.share - flip.before.share for flip in flips]
    unit = math.lcm(*(change.denominator for change in changes))
    return Paired(
        tasks=len(common),
        before=pass_at({key: before[key] for key in common})[1],
        after=pass_at({key: after[key] for key in common})[1],
        p_value=paired_p_value([int(change * unit) for change in changes]),
        gained=[flip for flip in flips if flip.after.passed and not flip.before.passed],
        lost=[flip for flip in flips if flip.before.passed and not flip.after.passed],
    )


# ---- by field of the tasks


def fields(tasks: Sequence[Json]) -> list[str]:
    """Return the fields of tasks that divide them into a few groups, dotted within objects."""
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        for name, value in _flat(task).items():
            values[name].append(value)
    divided = {name: len(set(_labels(given).values())) for name, given in values.items()}
    return [name for name, groups in divided.items() if 1 < groups <= _MOST_VALUES]


def by_field(
    tasks: Sequence[Json], found: Mapping[int, Outcome], field: str
) -> dict[str, tuple[int, Estimate]]:
    """Return how many tasks have each value of a field, and their success.

    Many different numbers are shown in quarters of their values.
    """
    values = [_flat(task).get(field) for task in tasks]
    labels = _labels(value for value in values if value is not None)
    groups: dict[str, dict[int, Outcome]] = {label: {} for label in (*labels.values(), NO_VALUE)}
    for at, outcome in found.items():
        groups[labels.get(values[at], NO_VALUE)][at] = outcome
    return {label: (len(each), pass_at(each)[1]) for label, each in groups.items() if each}


def _flat(task: Json, prefix: str = "") -> Json:
    """Return the numbers, texts and truth values of a task by their dotted names."""
    found: Json = {}
    for name, value in task.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float):
            found[f"{prefix}{name}"] = value
    return found


def _labels(values: Iterable[Any]) -> dict[Any, str]:
    """Return the group of each value, in order: the value itself, or a quarter of many numbers."""
    given = set(values)
    try:
        known = sorted(given)
    except TypeError:  # numbers and texts
        known = sorted(given, key=str)
    if len(known) <= _MOST_VALUES or not all(isinstance(one, int | float) for one in known):
        return {value: str(value) for value in known}
    size = math.ceil(len(known) / 4)
    quarters = [known[at : at + size] for at in range(0, len(known), size)]
    return {value: f"{part[0]:g} to {part[-1]:g}" for part in quarters for value in part}
