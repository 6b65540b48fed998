"""Evaluations of a run: each with its interval, two side by side, by field of the tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.history.evaluations import (
    SMALL,
    Flip,
    Outcomes,
    Paired,
    by_field,
    evaluated_tasks,
    fields,
    known_outcomes,
    pair,
    pass_at,
    split_of,
    success,
)
from agentrl.runs.excerpts import excerpt
from agentrl.runs.statistics import Estimate
from agentrl.ui.charts import Chart, Series, bars, curve, lines
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Json

router = APIRouter()
_FLIPS = 100
"""Tasks that flipped one way that a page lists."""


@router.get("/runs/{name}/evaluations")
def evaluations_page(
    request: Request, name: str, before: int | None = None, after: int | None = None, by: str = ""
) -> Response:
    run = run_of(request, name)
    found, tasks = known_outcomes(run), evaluated_tasks(run)
    before = before if before in found else min(found, default=0)
    after = after if after in found else max(found, default=0)
    known_fields = fields(tasks)
    by = by if by in known_fields else next(iter(known_fields), "")
    two = {step: found[step] for step in dict.fromkeys((before, after)) if step in found}
    paired = pair(found[before], found[after]) if len(two) == 2 else None
    held, there = run.index.progress()
    successes = {step: success(known) for step, known in found.items()}
    return page(
        request, "evaluations.html", run=run.current() | {"name": run.name}, found=found,
        successes=successes, split=split_of(run), before=before, after=after, by=by,
        fields=known_fields, paired=paired, flipped=flipped(paired, tasks), held=held, there=there,
        indexing=held < there > SMALL,
        charts=_charts(successes, two, tasks, by),
    )  # fmt: skip


def flipped(paired: Paired | None, tasks: Sequence[Json]) -> dict[str, list[tuple[Flip, str]]]:
    """Return the first tasks that flipped each way, each with its data in a line."""
    if paired is None:
        return {}
    ways = {"Gained": paired.gained, "Lost": paired.lost}
    return {
        way: [(flip, excerpt(json.dumps(tasks[flip.after.task]))) for flip in flips[:_FLIPS]]
        for way, flips in ways.items()
    }


def _charts(
    successes: Mapping[int, Estimate], two: Mapping[int, Outcomes], tasks: Sequence[Json], by: str
) -> list[Chart]:
    """Return success over steps; of two evaluations pass@k and success by field."""
    made: list[Chart] = []
    if len(successes) > 1:
        made.append(lines("success", "Success", [_estimates("success", successes)], unit="%"))
    chances = {step: pass_at(known) for step, known in two.items()}
    if any(len(known) > 1 for known in chances.values()):
        of_k = [_estimates(f"step {step}", known) for step, known in chances.items()]
        made.append(lines("pass", "pass@k", of_k, x="k", unit="%"))
    if by:
        groups = {step: by_field(tasks, known, by) for step, known in two.items()}
        labels = list(dict.fromkeys(label for known in groups.values() for label in known))
        series: list[Series] = []
        for step, known in groups.items():
            rates = [success(known[label]) if label in known else None for label in labels]
            series.append(
                {
                    "name": f"step {step}",
                    "values": [rate and rate.rate for rate in rates],
                    "spread": [list(rate[1:]) if rate else None for rate in rates],
                }
            )
        made.append(bars("fields", f"Success by {excerpt(by)}", labels, series, x=by, unit="%"))
    return made


def _estimates(name: str, estimates: Mapping[int, Estimate]) -> Series:
    rates = {x: one.rate for x, one in estimates.items()}
    return curve(name, rates, {x: one[1:] for x, one in estimates.items()}, style="marked")
