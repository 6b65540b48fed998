"""The list of runs, and one run."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from agentrl.history.sources import OpenRun
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.ui.views import page, run_of, sources

router = APIRouter()


@router.get("/")
def runs_page(request: Request) -> Response:
    found, faults = sources(request).all()
    return page(request, "runs.html", runs=[_listed(run) for run in found], faults=faults)


@router.get("/runs/{name}")
def run_page(request: Request, name: str) -> Response:
    run = run_of(request, name)
    return page(request, "run.html", run=run.current(), metrics=run.store.metrics(run.id))


@router.get("/runs/{name}/live")
async def live(request: Request, name: str) -> Response:
    """Server-sent events: ``changed`` whenever the run has something new."""
    run = run_of(request, name)

    async def events():
        yield "retry: 2000\n\n"
        async for version in request.app.state.watcher.changes(run):
            yield f"event: changed\ndata: {version}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _listed(run: OpenRun) -> dict[str, Any]:
    row, metrics = run.current(), run.store.metrics(run.id)
    curves = {
        name: [values[name] for values in metrics.values() if name in values]
        for name in (REWARD, HELD_OUT)
    }
    steps = (row["config"].get("run") or {}).get("steps")
    return row | {
        "folder": run.name,
        "step": max(metrics, default=0),
        "steps": steps,
        "reward": curves[REWARD],
        "held_out": curves[HELD_OUT],
    }
