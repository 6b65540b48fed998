"""The charts of a sweep: parallel coordinates, importance, contour and history."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.sweep.study import SweepResults, text_of
from agentrl.ui.charts import Chart, Points, bars, chart, lines

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_CELLS = 48
_NEAR = 0.08  # of an axis: within it, the surface is smooth


def sweep_charts(found: SweepResults) -> list[Chart]:
    """Return the charts, as far as there are trials for them."""
    pruned = [one for one in found.trials if one.state.name == "PRUNED" and one.value is not None]
    shown = [*pruned, *found.complete]  # the complete ones are drawn over the others
    if not shown:
        return []
    charts = [_parallel(found, shown)]
    if found.importance:
        shares = dict(zip(_short(list(found.importance)), found.importance.values(), strict=True))
        how = {"x": "setting", "unit": "%", "horizontal": True}
        charts.append(bars("importance", "Importance", {"share": shares}, **how))
    if len(found.space) > 1 and len(found.complete) > 2:
        charts.append(_contour(found))
    better = np.maximum if found.maximize else np.minimum
    best = better.accumulate([one.value or 0.0 for one in found.complete]).tolist()
    numbers = [one.number for one in found.complete]
    curves: dict[str, Points] = {
        "complete": {one.number: one.value for one in found.complete},
        "pruned": {one.number: one.value for one in pruned},
        "best": dict(zip(numbers, best, strict=True)),
    }
    title, dots = f"History of {found.metric}", ["complete", "pruned"]
    return [*charts, lines("history", title, curves, x="trial", dots=dots)]


def _parallel(found: SweepResults, shown: list[FrozenTrial]) -> Chart:
    names = list(found.space)
    return chart(
        "parallel", "parallel", "Trials over the settings",
        axes=[_axis(found, name) for name in names],
        lines=[[*_place(found, names, trial), trial.value] for trial in shown],
        numbers=[trial.number for trial in shown],
        states=[trial.state.name.lower() for trial in shown],
        metric=found.metric, maximize=found.maximize,
    )  # fmt: skip


def _contour(found: SweepResults) -> Chart:
    """Return the metric over the two most important settings.

    Between the complete trials it is their mean, weighted by a power of the inverse distance.
    """
    names = sorted(found.space, key=lambda name: -found.importance.get(name, 0.0))[:2]
    places = [_place(found, names, trial) for trial in found.complete]
    middles = (np.arange(_CELLS) + 0.5) / _CELLS
    cells = np.stack(np.meshgrid(middles, middles), axis=-1)  # [y, x, 2]
    squares = np.square(cells[:, :, None] - np.array(places)).sum(-1)  # [y, x, trial]
    weights = 1 / (squares + _NEAR**2) ** 2
    values = weights @ np.array([trial.value for trial in found.complete]) / weights.sum(-1)
    return chart(
        "contour", "contour", f"{found.metric} over the two most important settings",
        x=_axis(found, names[0]), y=_axis(found, names[1]), cells=values.round(5).tolist(),
        points=[[*place, trial.value, trial.number]
                for place, trial in zip(places, found.complete, strict=True)],
        metric=found.metric, maximize=found.maximize,
    )  # fmt: skip


def _short(names: list[str]) -> list[str]:
    """Return the last parts of names; whole names where two have the same."""
    last = [name.rpartition(".")[2] for name in names]
    return [one if last.count(one) == 1 else name for one, name in zip(last, names, strict=True)]


def _place(found: SweepResults, names: list[str], trial: FrozenTrial) -> list[float]:
    return [_position(found.space[name], trial.params[name]) for name in names]


def _position(kind: Any, value: Any) -> float:
    """Return where a value is on the axis of its setting, from 0 to 1."""
    if kind.single():
        return 0.5
    if choices := getattr(kind, "choices", None):
        return choices.index(value) / (len(choices) - 1)
    scale = math.log if kind.log else float
    return (scale(value) - scale(kind.low)) / (scale(kind.high) - scale(kind.low))


def _axis(found: SweepResults, name: str) -> dict[str, Any]:
    """Return an axis; it has ticks at each choice, or at both ends and in the middle."""
    kind: Any = found.space[name]
    between = np.geomspace if getattr(kind, "log", False) else np.linspace
    values = getattr(kind, "choices", None) or between(kind.low, kind.high, 3).tolist()
    return {"name": name, "ticks": [(_position(kind, one), text_of(one)) for one in values]}
