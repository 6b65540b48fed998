"""What the pictures of a sweep show, as numbers: axes from 0 to 1, a surface over two settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.sweep.record import SweepRecord, TrialRow

Ticks = list[tuple[float, str]]
"""Places on an axis from 0 to 1, and their labels."""

_CELLS = 48
_NEAR = 0.08  # of an axis: within it, the surface is smooth


@dataclass(frozen=True)
class Axis:
    name: str
    ticks: Ticks


@dataclass(frozen=True)
class Surface:
    """The metric over two settings; ``cells`` has a row for each y, from low to high."""

    x: Axis
    y: Axis
    cells: list[list[float]]
    points: list[tuple[float, float, TrialRow]]


def axes(record: SweepRecord) -> list[Axis]:
    return [Axis(one["name"], _ticks(one)) for one in record.space]


def places(record: SweepRecord, row: TrialRow) -> list[float]:
    """Return where a trial is on each axis."""
    return [_place(one, row.params[one["name"]]) for one in record.space]


def with_value(record: SweepRecord) -> list[TrialRow]:
    """Return the trials with a value of the metric, the complete ones last: they are drawn over."""
    pruned = [row for row in record.trials if row.state == "pruned" and row.value is not None]
    return pruned + sorted(record.complete, key=lambda row: row.number)


def best_so_far(record: SweepRecord) -> list[tuple[int, float]]:
    """Return, by the number of each complete trial, the best value up to it."""
    better = max if record.direction == "maximize" else min
    found: list[tuple[int, float]] = []
    for row in sorted(record.complete, key=lambda one: one.number):
        value = row.value or 0.0
        found.append((row.number, better(found[-1][1], value) if found else value))
    return found


def surface(record: SweepRecord) -> Surface | None:
    """Return the metric over the two most important settings, from the complete trials.

    Between trials it is the mean of all, weighted by the inverse of their squared distance. None:
    there are fewer than two settings or three trials.
    """
    names = [one["name"] for one in record.space]
    ranked = sorted(names, key=lambda name: -record.importance.get(name, 0.0))[:2]
    if len(ranked) < 2 or len(record.complete) < 3:
        return None
    at_x, at_y = map(names.index, ranked)
    points = [(places(record, row), row) for row in record.complete]
    grid = (np.arange(_CELLS) + 0.5) / _CELLS
    x, y = np.meshgrid(grid, grid)  # [cell, cell] each
    weights = np.stack(
        [
            1 / ((x - place[at_x]) ** 2 + (y - place[at_y]) ** 2 + _NEAR**2) ** 2
            for place, _ in points
        ]
    )  # [trial, cell, cell]
    values = np.array([row.value for _, row in points])
    cells = np.tensordot(values, weights, 1) / weights.sum(0)
    along = axes(record)
    return Surface(
        along[at_x], along[at_y], cells.round(5).tolist(),
        [(place[at_x], place[at_y], row) for place, row in points],
    )  # fmt: skip


def _place(dimension: Mapping[str, Any], value: Any) -> float:
    if choices := dimension["choices"]:
        return choices.index(value) / (len(choices) - 1) if len(choices) > 1 else 0.5
    low, high = dimension["low"], dimension["high"]
    if dimension["log"]:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _ticks(dimension: Mapping[str, Any]) -> Ticks:
    low, high = dimension["low"], dimension["high"]
    if choices := dimension["choices"]:
        values = choices
    elif dimension["log"]:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        inside = [10.0**power for power in powers if low < 10.0**power < high]
        values = [low, *inside, high]
    else:
        values = [low + (high - low) * part / 4 for part in range(5)]
    return [
        (_place(dimension, value), f"{value:.3g}" if isinstance(value, float) else str(value))
        for value in values
    ]
