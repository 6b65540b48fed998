"""The list of runs, and one run."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse

from agentrl.config.setting_names import flattened, recorded
from agentrl.config.settings import ModelSettings
from agentrl.console.report import serve_command
from agentrl.history.evaluations import known_outcomes, success
from agentrl.history.notes import read_notes, write_notes
from agentrl.history.overview import (
    alerts_of,
    outcomes_of,
    phase_spans,
    progress_of,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import circumstances, why_failed
from agentrl.runs.folder import how_to_fetch
from agentrl.runs.recorded import shown
from agentrl.ui.run_charts import books, metric_names, run_charts
from agentrl.ui.views import page, run_of, sources

router = APIRouter()
_MOST_POINTS = 200
"""Steps of a run that its charts show, about."""
_LARGEST_FORM = 100_000


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
    row, config = run.current(), run.folder.read_config()
    several = list(config.get("adapters") or ())
    adapters = several if len(several) > 1 else []
    every = -(-(run.store.last_step(run.id) or 1) // _MOST_POINTS)
    metrics = run.store.metrics(run.id, metric_names(adapters), every=every)
    intervals = {step: success(found)[1:] for step, found in known_outcomes(run).items()}
    kept = run.store.accounting(run.id)
    outcomes, failed = outcomes_of(run)
    return page(
        request, "run.html", run=row, progress=progress_of(run, row["state"]),
        why=why_failed(run.folder) if row["state"] == "failed" else None, every=every,
        charts=run_charts(name, metrics, intervals, phase_spans(run), adapters),
        books=books(name, kept) if kept.proxied or kept.recorded else None, kept=kept,
        alerts=alerts_of(metrics), outcomes=outcomes, failed=failed,
        busy=run.store.busy_runners(run.id) if row["state"] == "running" else {},
        commands=_commands(run, row["state"], config), settings=flattened(config),
        surroundings=circumstances(run.folder), notes=read_notes(run.folder),
    )  # fmt: skip


@router.post("/runs/{name}/notes")
async def change_notes(request: Request, name: str) -> Response:
    """Write the tags, note or archived flag of a form, and show the page that it was on."""
    run, body = run_of(request, name), b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise HTTPException(413, f"note: the form has more than {_LARGEST_FORM:,} bytes")
    form = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    archived = form["archived"] == "1" if "archived" in form else None
    write_notes(run.folder, tags=form.get("tags"), note=form.get("note"), archived=archived)
    return RedirectResponse("/" if archived is not None else f"/runs/{quote(name)}", 303)


@router.get("/runs/{name}/live")
async def live(request: Request, name: str) -> Response:
    """Server-sent events: ``changed`` whenever the run has something new."""
    run = run_of(request, name)

    async def events():
        yield "retry: 2000\n\n"
        async for version in request.app.state.watcher.changes(run):
            yield f"event: changed\ndata: {version}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _commands(run: OpenRun, state: str, config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what each command does, and the command."""
    folder, commands = run.folder, list[tuple[str, str]]()
    ended_early = state in ("interrupted", "failed")
    if run.row["kind"] == "train" and ended_early and folder.exists():
        commands.append(("Continue the run", f"agentrl train --resume {shown(folder.root)}"))
    model = ModelSettings(
        name=recorded(config, "model.name", "agentrl-tiny"),
        trust_remote_code=recorded(config, "model.trust_remote_code", False),
    )
    for what, adapter in (("final", folder.adapter), ("best", folder.best_adapter)):
        if adapter.is_dir():
            does = f"Serve the {what} adapter"
            fetches = [(f"Fetch the {what} adapter", one) for one in how_to_fetch(adapter)]
            commands += fetches or [(does, serve_command(adapter, model))]
    return commands
