"""Feedback of people on rollouts and calls: the form's target, and the export."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from agentrl.config.errors import ConfigError, explain
from agentrl.history.sources import OpenRun
from agentrl.ui.views import AUTHOR_COOKIE, Form, source_of
from agentrl_tracer.schemas import MAX_REWARD, Feedback
from agentrl_tracer.store import Store

router = APIRouter()
_YEAR_S = 365 * 24 * 3600


class _Judgment(BaseModel):
    """What the form of ``feedback_part.html`` sends; what is empty is not given."""

    name: str = Field(max_length=60)
    author: str = Field(max_length=100)
    rollout_id: str | None = None
    call_id: str | None = None
    thumb: Literal["up", "down"] | None = None
    score: float | None = Field(None, ge=-MAX_REWARD, le=MAX_REWARD)
    label: str | None = Field(None, max_length=100)
    comment: str | None = Field(None, max_length=10_000)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: dict[str, str]) -> dict[str, str]:
        # PostgreSQL's texts have no zero byte.
        return {name: value.replace("\0", "\ufffd") for name, value in given.items() if value}

    @model_validator(mode="after")
    def _says_something(self) -> _Judgment:
        if not any((self.thumb, self.score is not None, self.label, self.comment)):
            raise ValueError("give a thumb, a score, a label or a comment")
        return self


@router.post("/runs/{name}/feedback")
@router.post("/served/{name}/feedback")
def give_feedback(request: Request, name: str, form: Form) -> Response:
    """Keep the feedback of a form, and show the page that it was on."""
    source = source_of(request, name)
    try:
        given = _feedback(source, _Judgment.model_validate(form))
    except ValidationError as error:
        raise HTTPException(400, explain(error, _Judgment)) from error
    with contextlib.closing(Store(source.store.url, patience_s=5)) as store:
        store.add_feedback(given)
    kind, judged = ("calls", given.call_id) if given.call_id else ("rollouts", given.rollout_id)
    response = RedirectResponse(
        f"{source.path}/{kind}/{quote(judged or '', safe='')}#feedback", 303
    )
    response.set_cookie(
        AUTHOR_COOKIE, quote(given.author), max_age=_YEAR_S, httponly=True, samesite="strict"
    )
    return response


@router.get("/runs/{name}/feedback.jsonl")
@router.get("/served/{name}/feedback.jsonl")
def export(request: Request, name: str) -> Response:
    source = source_of(request, name)
    kept = source.store.feedback(source.id)
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in kept)
    headers = {"content-disposition": 'attachment; filename="feedback.jsonl"'}
    return Response(lines, media_type="application/jsonl", headers=headers)


def _feedback(source: OpenRun, form: _Judgment) -> Feedback:
    rollout_id = form.rollout_id
    if form.call_id:
        call = source.store.call(form.call_id)
        if call is None or call.run_id != source.id:
            raise ConfigError(f"call_id: {form.call_id!r} is no call of {source.name}")
        rollout_id = call.rollout_id
    elif source.id is None or not source.store.rollouts(source.id, ids=[rollout_id or ""]):
        raise ConfigError(f"rollout_id: {rollout_id!r} is no rollout of {source.name}")
    return Feedback(
        source.id, rollout_id, form.call_id, form.name, form.author,
        thumb={"up": 1, "down": -1, None: None}[form.thumb],
        score=form.score, label=form.label, comment=form.comment,
    )  # fmt: skip
