"""Evaluations: of a run, each with its interval, and of several runs beside their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.history.evaluations import (
    SMALL,
    Outcomes,
    by_field,
    differences,
    evaluated_tasks,
    fields,
    held_out,
    known_outcomes,
    pair,
    pass_at,
    success,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.excerpts import excerpt
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.runs.statistics import Estimate
from agentrl.ui.charts import Chart, Points, bars, lines, with_spread
from agentrl.ui.run_charts import thinned_metrics, values_of
from agentrl.ui.views import page, run_of, sources
from agentrl_tracer.schemas import Json

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


@router.get("/runs/{name}/evaluations")
def evaluations_page(
    request: Request, name: str, before: int | None = None, after: int | None = None, by: str = ""
) -> Response:
    run = run_of(request, name)
    return page(request, "evaluations.html", links=True, **evaluations_of(run, before, after, by))


def evaluations_of(
    run: OpenRun, before: int | None = None, after: int | None = None, by: str = ""
) -> dict[str, Any]:
    """Return what ``evaluation_figures.html`` shows; by default the first and the last step."""
    held, there = run.index.progress()
    found, tasks = known_outcomes(run), evaluated_tasks(run)
    before = before if before in found else min(found, default=0)
    after = after if after in found else max(found, default=0)
    known_fields = fields(tasks)
    by = by if by in known_fields else next(iter(known_fields), "")
    two = {step: found[step] for step in dict.fromkeys((before, after)) if step in found}
    paired = pair(found[before], found[after]) if len(two) == 2 else None
    successes = {step: success(known) for step, known in found.items()}
    return {
        "run": run.current(),
        "found": found,
        "successes": successes,
        "before": before,
        "after": after,
        "by": by,
        "fields": known_fields,
        "paired": paired,
        "tasks": tasks,
        "held": held,
        "there": there,
        "indexing": held < there > SMALL,
        "charts": _charts(successes, two, tasks, by),
    }


def _charts(
    successes: Mapping[int, Estimate], two: Mapping[int, Outcomes], tasks: Sequence[Json], by: str
) -> list[Chart]:
    """Return success over steps; of two evaluations pass@k and success by field."""
    made: list[Chart] = []
    if len(successes) > 1:
        rates = _estimates({"success": successes})
        made.append(lines("success", "Success", rates, unit="%", style="marked"))
    chances = {f"step {step}": pass_at(known) for step, known in two.items()}
    if any(len(known) > 1 for known in chances.values()):
        rates = _estimates(chances)
        made.append(lines("pass", "pass@k", rates, x="k", unit="%", style="marked"))
    if by:
        groups = {
            f"step {step}": {
                label: success(group) for label, group in by_field(tasks, known, by).items()
            }
            for step, known in two.items()
        }
        title = f"Success by {excerpt(by)}"
        made.append(bars("fields", title, _estimates(groups), x=by, unit="%"))
    return made


def _estimates(estimates: Mapping[str, Mapping[Any, Estimate]]) -> dict[str, Points]:
    columns: dict[str, Points] = {}
    for name, known in estimates.items():
        rates = {x: one.rate for x, one in known.items()}
        columns |= with_spread(name, rates, {x: (one.low, one.high) for x, one in known.items()})
    return columns


# ---- several runs side by side


@router.get("/compare")
def compare_page(request: Request, run: Annotated[tuple[str, ...], Query()] = ()) -> Response:
    """Show settings that differ, curves, and held-out success on the same tasks."""
    names = list(dict.fromkeys(run))
    if len(names) > _MOST_RUNS:
        raise ConfigError(f"run: {len(names)} runs are too many; compare at most {_MOST_RUNS}")
    runs = [run_of(request, name) for name in names]
    newest = held_out(runs, known_outcomes) if len(runs) > 1 else []
    return page(
        request, "compare.html", names=names, all_names=sources(request).names(),
        settings=differences(runs), charts=_curves(runs), held_out=[one for one in newest if one],
        evaluated_tasks=evaluated_tasks,
    )  # fmt: skip


def _curves(runs: Sequence[OpenRun]) -> list[Chart]:
    """Return the curves of all runs, a chart for each metric that one of them has."""
    known = {run.name: thinned_metrics(run, _CURVES)[0] for run in runs}
    charts = [
        lines(
            f"curve-{at}", title, {name: values_of(rows, metric) for name, rows in known.items()},
            unit=unit, style="marked" if metric == HELD_OUT else "",
        )
        for at, (metric, (title, unit)) in enumerate(_CURVES.items())
    ]  # fmt: skip
    return [one for one in charts if one["rows"]]
