"""The list of runs, and one run."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from agentrl.config.setting_names import flattened
from agentrl.history.evaluations import known_outcomes, success
from agentrl.history.notes import read_notes, write_notes
from agentrl.history.overview import (
    alerts_of,
    outcomes_of,
    phase_spans,
    progress_of,
    share_by_phase,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import circumstances, why_failed
from agentrl.runs.recorded import shown
from agentrl.runs.summary import shares_of_cores
from agentrl.ui.run_charts import PHASES, books, metric_names, run_charts, thinned_metrics
from agentrl.ui.views import Form, page, run_of, sources

router = APIRouter()


@router.get("/")
def runs_page(
    request: Request, text: str = "", state: str = "", tag: str = "", archived: bool = False
) -> Response:
    runs, faults = request.app.state.run_list.all()
    found = [run for run in runs if run.matches(text, state, tag, archived)]
    return page(
        request, "runs.html", runs=found, faults=faults, total=len(runs), text=text, state=state,
        served=sources(request).served_names(), tag=tag, archived=archived,
        states=sorted({run.state for run in runs}),
        tags=sorted({one for run in runs for one in run.notes.tags}),
    )  # fmt: skip


@router.get("/runs/{name}")
def run_page(request: Request, name: str) -> Response:
    run = run_of(request, name)
    resume = f"agentrl train --resume {shown(run.folder.root)}" if run.folder.exists() else ""
    return page(
        request, "run.html", **request.app.state.watcher.overview(run, overview),
        how_to_resume=resume,
        settings=flattened(run.folder.read_config()), surroundings=circumstances(run.folder),
        notes=read_notes(run.folder),
    )  # fmt: skip


def overview(run: OpenRun) -> dict[str, Any]:
    """Return what ``run_figures.html`` shows."""
    row, config = run.current(), run.folder.read_config()
    adapters = list(config.get("adapters") or ())
    metrics, every = thinned_metrics(run, metric_names(adapters))
    intervals = {step: success(found)[1:] for step, found in known_outcomes(run).items()}
    kept = run.store.accounting(run.id)
    held, there = run.index.progress()  # before what is read from it
    outcomes, failed = outcomes_of(run)
    return {
        "run": row,
        "progress": progress_of(run, row["state"]),
        "why": why_failed(run.folder),
        "every": every,
        "charts": run_charts(
            run.path,
            metrics,
            intervals,
            phase_spans(run),
            adapters,
            share_by_phase(run, PHASES),
            shares_of_cores(run.folder),
        ),
        "books": books(run.path, kept) if kept.proxied or kept.recorded else None,
        "kept": kept,
        "alerts": alerts_of(metrics),
        "held": held,
        "there": there,
        "outcomes": outcomes,
        "failed": failed,
        "busy": run.store.busy_runners(run.id) if row["state"] == "running" else {},
    }


@router.post("/runs/{name}/notes")
def change_notes(request: Request, name: str, form: Form) -> Response:
    """Write the tags, note or archived flag of a form, and show the page that it was on."""
    run = run_of(request, name)
    archived = form["archived"] == "1" if "archived" in form else None
    write_notes(run.folder, tags=form.get("tags"), note=form.get("note"), archived=archived)
    return RedirectResponse("/" if archived is not None else run.path, 303)


@router.get("/runs/{name}/live")
async def live(request: Request, name: str, seen: str = "") -> Response:
    """Server-sent events: ``changed`` whenever the run has something new since ``seen``."""
    run = run_of(request, name)

    async def events():
        yield "retry: 2000\n\n"
        async for _ in request.app.state.watcher.changes(run, seen):
            yield "event: changed\ndata: new\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
