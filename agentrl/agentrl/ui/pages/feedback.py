"""Feedback of people on rollouts and calls: the form's target, and the export."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from agentrl.config.errors import ConfigError
from agentrl.history.sources import OpenRun
from agentrl.ui.views import AUTHOR_COOKIE, source_of
from agentrl_tracer.schemas import Feedback, is_reward
from agentrl_tracer.store import Store

router = APIRouter()
_YEAR_S = 365 * 24 * 3600
_LARGEST_FORM = 100_000
_LONGEST = {"name": 60, "author": 100, "label": 100, "comment": 10_000}


@router.post("/runs/{name}/feedback")
@router.post("/served/{name}/feedback")
async def give_feedback(request: Request, name: str) -> Response:
    """Keep the feedback of a form, and show the page that it was on."""
    source, body = source_of(request, name), b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise HTTPException(413, f"comment: the form has more than {_LARGEST_FORM:,} bytes")
    form = {key: value.strip() for key, value in parse_qsl(body.decode("utf-8", "replace"))}
    given = _feedback(source, form)
    store = Store(source.store.url, patience_s=5)
    try:
        store.add_feedback(given)
    finally:
        store.close()
    what = ("calls", given.call_id) if given.call_id else ("rollouts", given.rollout_id)
    page = f"{source.path}/{what[0]}/{quote(str(what[1]), safe='')}#feedback"
    response = RedirectResponse(page, 303)
    response.set_cookie(
        AUTHOR_COOKIE, quote(given.author), max_age=_YEAR_S, httponly=True, samesite="strict"
    )
    return response


@router.get("/runs/{name}/feedback.jsonl")
@router.get("/served/{name}/feedback.jsonl")
def export(request: Request, name: str) -> Response:
    source = source_of(request, name)
    lines = as_lines(source.store.feedback(source.id))
    headers = {"content-disposition": 'attachment; filename="feedback.jsonl"'}
    return Response(lines, media_type="application/jsonl", headers=headers)


def as_lines(feedback: list[Feedback]) -> str:
    return "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in feedback)


def _feedback(source: OpenRun, form: dict[str, str]) -> Feedback:
    for field, most in _LONGEST.items():
        if len(form.get(field, "")) > most:
            raise HTTPException(400, f"{field}: has more than {most:,} characters")
        form[field] = form.get(field, "").replace("\0", "\ufffd")
    if not form["author"] or not form["name"]:
        raise HTTPException(400, "author, name: must not be empty")
    values: dict[str, Any] = {
        "thumb": {"up": 1, "down": -1}.get(form.get("thumb", "")),
        "score": _score(form.get("score", "")),
        "label": form["label"] or None,
        "comment": form["comment"] or None,
    }
    if all(value is None for value in values.values()):
        raise HTTPException(400, "give a thumb, a score, a label or a comment")
    rollout_id, call_id = form.get("rollout_id"), form.get("call_id")
    if call_id:
        call = source.store.call(call_id)
        if call is None or call.run_id != source.id:
            raise ConfigError(f"call_id: {call_id!r} is no call of {source.name}")
        rollout_id = call.rollout_id
    elif source.id is None or not source.store.rollouts(source.id, ids=[rollout_id or ""]):
        raise ConfigError(f"rollout_id: {rollout_id!r} is no rollout of {source.name}")
    return Feedback(source.id, rollout_id, call_id or None, form["name"], form["author"], **values)


def _score(text: str) -> float | None:
    try:
        score = float(text) if text else None
    except ValueError:
        score = float("nan")
    if score is not None and not is_reward(score):
        raise HTTPException(400, f"score: {text!r} is no number from -1e9 to 1e9")
    return score
