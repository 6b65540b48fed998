"""Compare runs: their settings, curves, and held-out success on the same tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.setting_names import flattened
from agentrl.history.evaluations import (
    Evaluation,
    Outcome,
    Paired,
    evaluated_tasks,
    evaluations,
    outcomes,
    pair,
)
from agentrl.history.sources import OpenRun

_OF_THE_PLACE = ("run.name", "run.folder", "gateway.url", "gateway.port")
"""Settings in which all runs differ."""


@dataclass(frozen=True)
class HeldOut:
    """A run's newest evaluation, and how it compares with the first run's on the same tasks."""

    run: OpenRun
    evaluation: Evaluation | None
    against_first: Paired | None
    """None for the first run, without an evaluation, and without a task that both have."""


def differences(runs: Sequence[OpenRun]) -> dict[str, list[Any]]:
    """Return the settings that are not equal in all runs, with each run's value; None if unset."""
    settings = [flattened(run.row["config"]) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names}
    return {
        name: given
        for name, given in values.items()
        if name not in _OF_THE_PLACE and any(value != given[0] for value in given)
    }


def held_out(runs: Sequence[OpenRun]) -> list[HeldOut]:
    """Return each run's newest evaluation; tasks are the same if their data are."""
    found: list[HeldOut] = []
    first: dict[tuple[str, int], Outcome] = {}
    for run in runs:
        known = evaluations(run)
        by_data = outcomes_by_data(run, known[-1].step) if known else {}
        found.append(
            HeldOut(run, known[-1] if known else None, pair(first, by_data) if found else None)
        )
        first = by_data if len(found) == 1 else first
    return found


def outcomes_by_data(run: OpenRun, step: int) -> dict[tuple[str, int], Outcome]:
    """Return outcomes by the task's data as text, and its place among tasks with equal data."""
    texts = [json.dumps(task, sort_keys=True) for task in evaluated_tasks(run)]
    seen = Counter[str]()
    keys: list[tuple[str, int]] = []
    for text in texts:
        keys.append((text, seen[text]))
        seen[text] += 1
    return {keys[at]: outcome for at, outcome in outcomes(run, step).items()}
