"""The table of a run's rollouts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.history.rollout_table import Page, Query, find_rollouts
from agentrl.ui.views import page, run_of

router = APIRouter()
_PER_PAGE = 50
_COLUMNS = (
    "step", "purpose", "task", "index", "status", "reward", "attempts", "calls", "tokens",
    "seconds", "agent", "error",
)  # fmt: skip


@router.get("/runs/{name}/rollouts")
def rollouts_page(
    request: Request, name: str, where: str = "", search: str = "", sort: str = "", at: int = 0
) -> Response:
    run = run_of(request, name)
    query = Query(where, search, sort, _PER_PAGE, max(at, 0))
    fault = None
    try:
        found = find_rollouts(run.index, query)
    except ConfigError as error:
        found, fault = Page([], 0), str(error)
    held, there = run.index.progress(run.store, run.id)
    return page(
        request, "rollouts.html", run=run.current(), columns=_COLUMNS, found=found, query=query,
        fault=fault, held=held, there=there,
    )  # fmt: skip
