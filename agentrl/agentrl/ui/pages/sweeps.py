"""Sweeps over settings: the list of them, and one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.sweep.study import SweepResults, read_results, sweeps_in
from agentrl.ui.sweep_charts import sweep_charts
from agentrl.ui.views import page, sources

router = APIRouter()


@router.get("/sweeps")
def sweeps_page(request: Request) -> Response:
    root = sources(request).root
    found: list[SweepResults] = []
    faults: list[str] = []
    for name in sweeps_in(root):
        try:
            found.append(read_results(root, name))
        except ConfigError as error:
            faults.append(str(error))
    return page(request, "sweeps.html", sweeps=found, faults=faults)


@router.get("/sweeps/{name}")
def sweep_page(request: Request, name: str, seen: str = "") -> Response:
    """Show a sweep; with ``seen``, answer 204 as long as nothing is new since then."""
    found = read_results(sources(request).root, name)
    if seen == found.version:
        return Response(status_code=204)
    return page(request, "sweep.html", found=found, charts=sweep_charts(found), links=True)
