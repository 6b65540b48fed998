"""What ``agentrl serve`` recorded: calls without a run, by store."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrl.history.index import find_served
from agentrl.runs.excerpts import answer_excerpt, prompt_excerpt
from agentrl.ui.views import page, sources

router = APIRouter()


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
