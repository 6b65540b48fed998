"""Calls of a run by verdict."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import SkipReason

router = APIRouter()
_PER_PAGE = 50
VERDICTS = ("trained", "pending", *SkipReason)


@router.get("/runs/{name}/calls")
def calls_page(request: Request, name: str, verdict: str = "trained", before: str = "") -> Response:
    run = run_of(request, name)
    if verdict not in VERDICTS:
        raise ConfigError(f"verdict: {verdict!r} is none; there are {', '.join(VERDICTS)}")
    try:
        calls = run.store.judged(run.id, verdict, before, _PER_PAGE + 1)
    except ValueError as error:
        raise ConfigError(f"before: {before!r} is no place in this list") from error
    kept = run.store.accounting(run.id)
    counts = {"trained": kept.trained, **kept.skipped, "pending": kept.pending}
    return page(
        request, "calls.html", run=run.current(), verdict=verdict, before=before,
        counts={one: count for one, count in counts.items() if count or one == verdict},
        calls=calls[:_PER_PAGE], more=len(calls) > _PER_PAGE,
    )  # fmt: skip
