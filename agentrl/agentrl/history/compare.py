"""Compare runs: their settings, curves, and held-out success on the same tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.setting_names import flattened
from agentrl.history.evaluations import (
    Outcome,
    Outcomes,
    Paired,
    evaluated_tasks,
    pair,
    success,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.statistics import Estimate

_OF_THE_PLACE = ("run.name", "run.folder", "gateway.url", "gateway.port")
"""Settings in which all runs differ."""


@dataclass(frozen=True)
class HeldOut:
    """A run's newest evaluation, and how it compares with the first run's on the same tasks.

    Tasks are the same if their data are.
    """

    run: OpenRun
    step: int
    tasks: int
    success: Estimate
    against_first: Paired | None
    """None for the first run, and without a task that both have."""


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
    known = [max(read(run).items(), default=(0, {}), key=lambda one: one[0]) for run in runs]
    by_data = [_by_data(run, found) for run, (_, found) in zip(runs, known, strict=True)]
    rows: list[HeldOut | None] = []
    for run, (step, found), own in zip(runs, known, by_data, strict=True):
        paired = pair(by_data[0], own) if rows else None
        rows.append(HeldOut(run, step, len(found), success(found), paired) if found else None)
    return rows


def _by_data(run: OpenRun, found: Outcomes) -> dict[tuple[str, int], Outcome]:
    """Return outcomes by the task's data as text, and its place among tasks with equal data."""
    seen = Counter[str]()
    keys: list[tuple[str, int]] = []
    for task in evaluated_tasks(run):
        text = json.dumps(task, sort_keys=True)
        keys.append((text, seen[text]))
        seen[text] += 1
    return {keys[at]: outcome for at, outcome in found.items()}
