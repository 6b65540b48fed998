"""The charts of a sweep, for its page and for the file that it writes at its end."""

from __future__ import annotations

from typing import Any

from agentrl.sweep.figures import Axis, axes, best_so_far, places, surface, with_value
from agentrl.sweep.record import SweepRecord, TrialRow, short_names
from agentrl.ui.charts import Chart, Points, bars, chart, lines


def sweep_charts(record: SweepRecord) -> list[Chart]:
    """Return parallel coordinates, importance, contour and history, as far as there are trials."""
    rows = with_value(record)
    if not rows:
        return []
    found = [_parallel(record, rows)]
    if record.importance:
        short = short_names(record)
        shares: Points = {short[name]: value for name, value in record.importance.items()}
        found.append(
            bars(
                "importance",
                "Importance",
                {"share": shares},
                x="setting",
                unit="%",
                horizontal=True,
            )
        )
    if (contour := _contour(record)) is not None:
        found.append(contour)
    curves: dict[str, Points] = {
        "complete": {row.number: row.value for row in rows if row.state == "complete"},
        "pruned, so far": {row.number: row.value for row in rows if row.state == "pruned"},
        "best": dict(best_so_far(record)),
    }
    title, dots = f"History of {record.metric}", ["complete", "pruned, so far"]
    found.append(lines("history", title, curves, x="trial", dots=dots))
    return found


def _parallel(record: SweepRecord, rows: list[TrialRow]) -> Chart:
    names = [one["name"] for one in record.space]
    return chart(
        "parallel", "parallel", "Trials over the settings",
        ["trial", "state", *names, record.metric],
        [[r.number, r.state, *(r.params[name] for name in names), r.value] for r in rows],
        axes=[_axis(one) for one in axes(record)],
        lines=[[*places(record, row), row.value] for row in rows],
        numbers=[row.number for row in rows], states=[row.state for row in rows],
        metric=record.metric, maximize=record.direction == "maximize",
    )  # fmt: skip


def _contour(record: SweepRecord) -> Chart | None:
    found = surface(record)
    if found is None:
        return None
    x, y = found.x.name, found.y.name
    return chart(
        "contour", "contour", f"{record.metric} over the two most important settings",
        ["trial", x, y, record.metric],
        [[row.number, row.params[x], row.params[y], row.value] for _, _, row in found.points],
        x=_axis(found.x), y=_axis(found.y), cells=found.cells, metric=record.metric,
        points=[[at_x, at_y, row.value, row.number] for at_x, at_y, row in found.points],
        maximize=record.direction == "maximize",
    )  # fmt: skip


def _axis(axis: Axis) -> dict[str, Any]:
    return {"name": axis.name, "ticks": axis.ticks}
