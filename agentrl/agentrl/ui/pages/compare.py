"""Several runs side by side: settings, curves, and held-out success on the same tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.history.evaluations import (
    differences,
    evaluated_tasks,
    held_out,
    known_outcomes,
    split_of,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.ui.charts import Chart, curve, lines
from agentrl.ui.pages.evaluations import flipped
from agentrl.ui.views import page, run_of, sources

router = APIRouter()
_MOST_RUNS = 8
_CURVES = {
    REWARD: ("Mean reward", ""),
    HELD_OUT: ("Held-out success", "%"),
    "answers/tokens": ("Tokens of an answer", ""),
    "entropy": ("Entropy", ""),
    "sampler_trainer/kl": ("KL of sampler and trainer", ""),
    "clip_fraction": ("Clip fraction", "%"),
}


@router.get("/compare")
def compare_page(
    request: Request,
    run: Annotated[tuple[str, ...], Query()] = (),
    over: Literal["step", "time"] = "step",
) -> Response:
    names = list(dict.fromkeys(run))
    if len(names) > _MOST_RUNS:
        raise ConfigError(f"run: {len(names)} runs are too many; compare at most {_MOST_RUNS}")
    runs = [run_of(request, name) for name in names]
    newest = held_out(runs, known_outcomes) if len(runs) > 1 else []
    return page(
        request, "compare.html", names=names, all_names=sources(request).names(), over=over,
        settings=differences(runs), charts=_charts(runs, over),
        held_out=[
            {
                "newest": one,
                "model": recorded(one.run.row["config"], "model.name"),
                "split": split_of(one.run),
                "flipped": flipped(one.against_first, evaluated_tasks(one.run)),
            }
            for one in newest
            if one is not None
        ],
    )  # fmt: skip


def _charts(runs: list[OpenRun], over: str) -> list[Chart]:
    """Return the curves of all runs, a chart for each metric that one of them has."""
    made: list[Chart] = []
    values = {run.name: run.store.metrics(run.id, _CURVES) for run in runs}
    for at, (metric, (title, unit)) in enumerate(_CURVES.items()):
        known = {
            name: {step: row[metric] for step, row in rows.items() if metric in row}
            for name, rows in values.items()
        }
        style = "marked" if metric == HELD_OUT else "line"
        series = [
            curve(run.name, _in_minutes(run, metric, known[run.name]), style=style)
            if over == "time"
            else curve(run.name, known[run.name], style=style)
            for run in runs
        ]
        if any(known.values()):
            x = "minutes" if over == "time" else "step"
            made.append(lines(f"curve-{at}", title, series, x=x, unit=unit))
    return made


def _in_minutes(
    run: OpenRun, metric: str, values: Mapping[int, float]
) -> list[tuple[float, float]]:
    """Return values by the minutes since the run was created."""
    at = run.store.logged_at(run.id, metric, max(values, default=0) + 1)
    minutes = {step: round((when - run.row["created_at"]) / 60, 2) for step, when in at.items()}
    return [(minutes[step], value) for step, value in values.items() if step in minutes]
