"""Tables of calls: a run's by verdict, and those without a run, of ``agentrl serve``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.history.index import find_served
from agentrl.history.rollout.conversation import answer_excerpt, prompt_excerpt
from agentrl.ui.views import page, run_of, sources
from agentrl_tracer.schemas import SkipReason

router = APIRouter()
_PER_PAGE = 50
_VERDICTS = ("trained", "pending", *SkipReason)


@router.get("/runs/{name}/calls")
def calls_page(request: Request, name: str, verdict: str = "trained", before: str = "") -> Response:
    run = run_of(request, name)
    if verdict not in _VERDICTS:
        raise ConfigError(f"verdict: {verdict!r} is none; there are {', '.join(_VERDICTS)}")
    try:
        calls = run.store.judged(run.id, verdict, before, _PER_PAGE + 1)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"before: {before!r} is no place in this list") from error
    kept = run.store.accounting(run.id)
    counts = {"trained": kept.trained, **kept.skipped, "pending": kept.pending}
    return page(
        request, "calls.html", run=run.current(), verdict=verdict, before=before,
        counts={one: count for one, count in counts.items() if count or one == verdict},
        calls=calls[:_PER_PAGE], more=len(calls) > _PER_PAGE,
    )  # fmt: skip


@router.get("/served/{name}")
def served_page(request: Request, name: str, search: str = "", before: str = "") -> Response:
    store = sources(request).served(name)
    request.app.state.watcher.look_at(store)
    held, there = store.index.progress()
    return page(
        request, "served.html", store=store, search=search, before=before, held=held, there=there,
        found=find_served(store.store, store.index, search, before),
        prompt_excerpt=prompt_excerpt, answer_excerpt=answer_excerpt,
    )  # fmt: skip
