"""One call: its messages, its facts, the raw request and answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.history.conversation import Message, answered, asked, shown_before
from agentrl.history.sources import OpenRun
from agentrl.ui.texts import MOST
from agentrl.ui.views import page, source_of
from agentrl_tracer.schemas import Call, Json

router = APIRouter()
_SHOWN_OF_CALL = 60_000
"""Characters of one call's messages that a page shows."""
_LEAST = 200  # of them, that a message counts as


@dataclass(frozen=True)
class Said:
    """A message as a page shows it; ``length`` of its text before it was cut, in characters."""

    message: Message
    length: int

    @property
    def is_cut(self) -> bool:
        return len(self.message.text) < self.length


@dataclass(frozen=True)
class Chat:
    """The messages of a call. ``before`` of them are those of an earlier call; ``asked`` are the
    ones after, but for ``left_out``."""

    call: Call
    before: int
    asked: list[Said]
    left_out: int
    answer: Said | None


def chat_of(call: Call, earlier: Sequence[Sequence[Message]] = ()) -> Chat:
    """Prepare a call for the page, without the messages that earlier conversations show."""
    messages, answer = asked(call.request), answered(call)
    before = shown_before(messages, earlier)
    shown, left_out = _fit(messages[before:])
    return Chat(call, before, shown, left_out, answer and cut_message(answer))


def _fit(messages: Sequence[Message]) -> tuple[list[Said], int]:
    """Cut messages to what a page shows; return how many are left out, too."""
    shown: list[Said] = []
    left = _SHOWN_OF_CALL
    for message in messages:
        if left <= 0:
            break
        said = cut_message(message, min(MOST, left))
        left -= max(_LEAST, len(said.message.text) + len(said.message.reasoning))
        shown.append(said)
    return shown, len(messages) - len(shown)


def conversation(call: Call) -> list[Message]:
    """Return what a call asked and answered."""
    answer = answered(call)
    return asked(call.request) + ([answer] if answer else [])


def cut_message(message: Message, most: int = MOST) -> Said:
    """Cut each text of a message after ``most`` characters."""
    tools = tuple(replace(one, arguments=one.arguments[:most]) for one in message.tools[:50])
    text, reasoning = message.text[:most], message.reasoning[:most]
    return Said(replace(message, text=text, reasoning=reasoning, tools=tools), len(message.text))


@router.get("/runs/{name}/calls/{call_id}")
@router.get("/served/{name}/calls/{call_id}")
def call_page(request: Request, name: str, call_id: str, first: int = 0) -> Response:
    """Show a call as chat, or its ``first`` messages; without the page around if htmx asks."""
    run = source_of(request, name)
    call = _call(run, call_id)
    if first > 0:
        shown, left_out = _fit(asked(call.request)[:first])
        chat = Chat(call, 0, shown, left_out, None)
    else:
        chat = chat_of(call, _previous(run, call))
    return _part(request, "call.html", run=run.current(), chat=chat, first=first)


@router.get("/runs/{name}/calls/{call_id}/raw")
@router.get("/served/{name}/calls/{call_id}/raw")
def raw_page(request: Request, name: str, call_id: str) -> Response:
    """Show the request and the answer as recorded, and the request as a command."""
    run = source_of(request, name)
    call, row = _call(run, call_id), run.current()
    raw = {
        what: _json(body)
        for what, body in (("request", call.request), ("answer", call.response))
        if body is not None
    }
    return _part(request, "raw.html", run=row, call=call, raw=raw, curl=_curl(row, call))


@router.get("/runs/{name}/calls/{call_id}/{what}.json")
@router.get("/served/{name}/calls/{call_id}/{what}.json")
def download(request: Request, name: str, call_id: str, what: str) -> Response:
    """Send the recorded request or answer as a file of text."""
    call = _call(source_of(request, name), call_id)
    body = {"request": call.request, "answer": call.response}.get(what)
    if body is None:
        raise HTTPException(404, f"call {call_id} has no {what}")
    return text_file(_json(body), f"{what}.json")


def text_file(content: str | bytes, name: str) -> Response:
    """Send what agents wrote so that no browser renders it."""
    sent = content if isinstance(content, bytes) else content.encode(errors="replace")
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(sent, media_type="text/plain; charset=utf-8", headers=headers)


def _part(request: Request, template: str, **values: Any) -> Response:
    is_part = request.headers.get("hx-request") == "true"
    return page(request, template, is_part=is_part, **values)


def _call(run: OpenRun, call_id: str) -> Call:
    call = run.store.call(call_id)
    if call is None or call.run_id != run.id:
        raise HTTPException(404, f"{call_id!r} is no call of {run.name}")
    return call


def _previous(run: OpenRun, call: Call) -> list[list[Message]]:
    """Return the conversation of the call before this one in its attempt."""
    if call.attempt_id is None:
        return []
    others = run.store.calls(attempt_ids=[call.attempt_id], bodies=False)
    before = [other.id for other in others if other.seq < call.seq]
    found = run.store.call(before[-1]) if before else None
    return [conversation(found)] if found else []


def _json(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, indent=2)


def _curl(run: Json, call: Call) -> str:
    """Return the request as a shell command that the run's gateway answers."""
    request = call.request or {}
    if "messages" in request:
        path = "messages" if call.response_id.startswith("msg_") else "chat/completions"
    else:
        path = "responses" if "input" in request else "completions"
    base = (run["config"].get("gateway") or {}).get("url") or "http://127.0.0.1:8000"
    body = json.dumps(request, ensure_ascii=False)
    data = shlex.quote(body) if len(body) <= MOST else "@request.json"
    return (
        f"curl {base}/v1/{path} \\\n"
        '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n'
        f'  -H "Content-Type: application/json" \\\n  -d {data}\n'
    )
