"""Evaluations: success by step, by task and by field of the tasks, what flipped, and runs compared.

A rollout is a success if its reward is at least ``evaluation.success_reward`` of the run's
configuration; one without a reward is none. Pages read the run's index, which may still be filled;
commands read the store.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import numpy as np

from agentrl.config.setting_names import flattened, recorded
from agentrl.history.index import task_index
from agentrl.history.sources import OpenRun
from agentrl.runs.statistics import Estimate, paired_p_value, pass_estimates, task_interval
from agentrl_tracer.schemas import Json, Purpose, RolloutState
from agentrl_trainer.data.rewards import rollout_rewards

NO_VALUE = "none"
_MOST_VALUES = 20
"""Different values of a field that are shown one by one; more numbers are shown in quarters."""
SMALL = 2_000
"""Rollouts of a run whose evaluations pages read from its store until they are indexed."""
_OF_THE_PLACE = ("run.name", "run.folder", "gateway.url", "gateway.urls", "gateway.port")
"""Settings in which all runs differ."""
_OUTCOMES = """
SELECT step, task, coalesce(sum(reward >= ?), 0), count(*), min(id)
FROM rollout INDEXED BY evaluated
WHERE purpose = 'eval' AND final = 1 AND status != 'cancelled'
GROUP BY step, task
"""


class Outcome(NamedTuple):
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


Outcomes = dict[int, Outcome]
"""Of one evaluation, by the task's place in its split."""
Key = TypeVar("Key", bound=Hashable)


class Flip(NamedTuple):
    """How one task went in two evaluations."""

    before: Outcome
    after: Outcome


class Paired(NamedTuple):
    """Two evaluations on the tasks that both have."""

    tasks: int
    before: Estimate
    after: Estimate
    p_value: float
    """By ``paired_p_value``: an exact sign-flip test; with one sample a task, exact McNemar."""
    gained: list[Flip]
    lost: list[Flip]
    stayed_wrong: list[Flip]

    @property
    def difference(self) -> float:
        return self.after.rate - self.before.rate


def known_outcomes(run: OpenRun) -> dict[int, Outcomes]:
    """Return the evaluations by step: of the index, or of the store while it is small to read."""
    held, there = run.index.progress()
    return stored_outcomes(run) if held < there <= SMALL else indexed_outcomes(run)


def indexed_outcomes(run: OpenRun) -> dict[int, Outcomes]:
    """Return the evaluations that the run's index holds, by step."""
    found: dict[int, Outcomes] = {}
    with run.index.read() as db:
        for step, task, *counts in db.execute(_OUTCOMES, [success_reward(run)]):
            found.setdefault(step, {})[task] = Outcome(task, *counts)
    return found


def stored_outcomes(run: OpenRun) -> dict[int, Outcomes]:
    """Return the evaluations that the run's store holds, by step."""
    known = run.store.rollouts(run.id, purpose=Purpose.EVAL)
    ended = [one for one in known if one.state in (RolloutState.SUCCEEDED, RolloutState.FAILED)]
    earned = rollout_rewards(ended, run.store.rewards([one.id for one in ended]))
    threshold, found = success_reward(run), dict[int, Outcomes]()
    for one in sorted(ended, key=lambda rollout: (rollout.step, rollout.id)):
        task, reward = task_index(one), earned[one.id]
        of_step = found.setdefault(one.step, {})
        _, successes, samples, first = of_step.get(task, (task, 0, 0, one.id))
        successes += reward is not None and reward >= threshold
        of_step[task] = Outcome(task, successes, samples + 1, first)
    return found


def success_reward(run: OpenRun) -> float:
    """Return the reward from which on a rollout of the run is a success."""
    return float(recorded(run.row["config"], "evaluation.success_reward", 1.0))


def evaluated_tasks(run: OpenRun) -> list[Json]:
    """Return the data of the tasks that the run evaluates, in order."""
    return run.store.tasks(run.id, split_of(run))


def task_data(run: OpenRun, purpose: Purpose, index: int) -> Json | None:
    """Return the task of rollouts with a purpose, by its place in their split."""
    split = split_of(run) if purpose == Purpose.EVAL else purpose
    return run.store.task(run.id, split, index)


def split_of(run: OpenRun) -> str:
    """Return the split that the run's evaluations are of: ``eval``, or that of the command."""
    return "eval" if run.row["kind"] == "train" else run.row["kind"]


def success(found: Mapping[Any, Outcome]) -> Estimate:
    """Return the mean over tasks of the share of their samples that succeeded."""
    shares = [one.successes / one.samples for one in found.values()]
    samples = min(one.samples for one in found.values())
    rate = sum(one.share for one in found.values()) / len(found)  # exactly 0.4 of 6 in 15
    return Estimate(float(rate), *task_interval(shares, samples))


def pass_at(found: Mapping[Any, Outcome]) -> dict[int, Estimate]:
    """Return pass@k with intervals, by k."""
    return pass_estimates([(one.successes, one.samples) for one in found.values()])


def pair(before: Mapping[Key, Outcome], after: Mapping[Key, Outcome]) -> Paired | None:
    """Compare two evaluations on the tasks whose keys both have; None without any."""
    both = {key: Flip(before[key], after[key]) for key in before if key in after}
    if not both:
        return None
    changes = [flip.after.share - flip.before.share for flip in both.values()]
    unit = math.lcm(*(change.denominator for change in changes))
    return Paired(
        tasks=len(both),
        before=success({key: flip.before for key, flip in both.items()}),
        after=success({key: flip.after for key, flip in both.items()}),
        p_value=paired_p_value([int(change * unit) for change in changes]),
        gained=[one for one in both.values() if one.after.passed and not one.before.passed],
        lost=[one for one in both.values() if one.before.passed and not one.after.passed],
        stayed_wrong=[one for one in both.values() if not (one.before.passed or one.after.passed)],
    )


# ---- by field of the tasks


def fields(tasks: Sequence[Json]) -> list[str]:
    """Return the fields of tasks that divide them into a few groups, dotted within objects."""
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        for name, value in _scalars(task).items():
            values[name].append(value)
    groups = {name: len({*_labels(given).values()}) for name, given in values.items()}
    return [name for name, n in groups.items() if 1 < n <= _MOST_VALUES and n < len(values[name])]


def by_field(tasks: Sequence[Json], found: Outcomes, field: str) -> dict[str, Outcomes]:
    """Group outcomes by a field of their tasks; many different numbers in quarters of them."""
    values = [_scalars(task).get(field) for task in tasks]
    labels = _labels(value for value in values if value is not None)
    groups: dict[str, Outcomes] = {label: {} for label in (*labels.values(), NO_VALUE)}
    for at, outcome in found.items():
        groups[labels.get(values[at], NO_VALUE)][at] = outcome
    return {label: group for label, group in groups.items() if group}


def has_field(tasks: Iterable[Json], field: str) -> bool:
    """Tell whether tasks have a text or a number in a field."""
    return any(field in _scalars(task) for task in tasks)


def _scalars(task: Json) -> Json:
    known = flattened(task).items()
    return {name: value for name, value in known if isinstance(value, str | int | float)}


def _labels(values: Iterable[Any]) -> dict[Any, str]:
    """Return the group of each value, in order: the value itself, or a quarter of many numbers."""
    given = set(values)
    numbers = all(isinstance(one, int | float) for one in given)
    known = sorted(given) if numbers else sorted(given, key=str)
    if len(known) <= _MOST_VALUES or not numbers:
        return {value: str(value) for value in known}
    shown = [str(one) if isinstance(one, int) else f"{one:.12g}" for one in known]
    quarters = np.array_split(np.arange(len(known)), 4)
    return {known[at]: f"{shown[p[0]]} to {shown[p[-1]]}" for p in quarters for at in p}


# ---- several runs


class HeldOut(NamedTuple):
    """A run's newest evaluation, and how it compares with the first run's on the same tasks."""

    run: OpenRun
    step: int
    tasks: int
    success: Estimate
    against_first: Paired | None
    """None for the first run, and without a task whose data both have."""


def differences(runs: Sequence[OpenRun]) -> dict[str, list[Any]]:
    """Return the settings that are not equal in all runs, with each run's value; None if unset.

    Runs of several kinds, such as train and eval, are compared in the settings that all have.
    """
    settings = [flattened(run.row["config"]) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    if len({run.row["kind"] for run in runs}) > 1:
        names = [name for name in names if all(name in each for each in settings)]
    values = {name: [each.get(name) for each in settings] for name in names}
    return {
        name: given
        for name, given in values.items()
        if name not in _OF_THE_PLACE and any(value != given[0] for value in given)
    }


def held_out(
    runs: Sequence[OpenRun], read: Callable[[OpenRun], dict[int, Outcomes]]
) -> list[HeldOut | None]:
    """Return the newest evaluation of each run; None without one.

    Args:
        read: ``known_outcomes`` or ``stored_outcomes``.
    """
    rows: list[HeldOut | None] = []
    first: dict[tuple[str, int], Outcome] | None = None
    for run in runs:
        step, found = max(read(run).items(), default=(0, Outcomes()))
        own = _by_data(run, found)
        paired = pair(first, own) if first is not None else None
        first = own if first is None else first
        rows.append(HeldOut(run, step, len(found), success(found), paired) if found else None)
    return rows


def _by_data(run: OpenRun, found: Outcomes) -> dict[tuple[str, int], Outcome]:
    """Return outcomes by the task's data as text, and its place among tasks with equal data."""
    seen = Counter[str]()
    outcomes: dict[tuple[str, int], Outcome] = {}
    for at, task in enumerate(evaluated_tasks(run)):
        text = json.dumps(task, sort_keys=True)
        if at in found:
            outcomes[text, seen[text]] = found[at]
        seen[text] += 1
    return outcomes
