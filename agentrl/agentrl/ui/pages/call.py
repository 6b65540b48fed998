"""One call: its messages, the raw request and answer, its tokens, and its replays."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from numpy.typing import NDArray
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from agentrl.config.errors import ConfigError, explain
from agentrl.gateway.on_demand import Replayer, Sampling, replays_of, targets
from agentrl.history.rollout.conversation import Message, answered, asked, path_of, shown_before
from agentrl.history.rollout.tokens import CallTokens, call_tokens, origin_of
from agentrl.history.rollout.vocabulary import Vocabulary
from agentrl.history.sources import OpenRun
from agentrl.runs.token_records import read_call
from agentrl.ui.texts import MOST
from agentrl.ui.views import Form, page, run_of, source_of
from agentrl_tracer.schemas import Call, Json

router, _of_call = APIRouter(), APIRouter()
_SHOWN_OF_CALL = 60_000
"""Characters of one call's messages after which a page shows no further message."""
_LEAST = 200  # of them, that a message counts as


def _find(request: Request, name: str, call_id: str) -> tuple[OpenRun, Call]:
    source = source_of(request, name)
    call = source.store.call(call_id)
    if call is None or call.run_id != source.id:
        raise HTTPException(404, f"{call_id!r} is no call of {source.name}")
    return source, call


_Found = Annotated[tuple[OpenRun, Call], Depends(_find)]
"""The run or the served store that a path names, and the call in it."""


@dataclass(frozen=True)
class Chat:
    """The messages of a call. ``before`` of them are those of an earlier call; ``asked`` are the
    ones after, but for ``left_out`` at the end."""

    call: Call
    before: int
    asked: list[Message]
    left_out: int
    answer: Message | None


def chat_of(call: Call, earlier: Sequence[Sequence[Message]] = ()) -> Chat:
    """Prepare a call for the page, without the messages that earlier conversations show."""
    messages = asked(call.request)
    before = shown_before(messages, earlier)
    lengths = accumulate(map(shown_length, messages[before:]), initial=0)
    places = zip(messages[before:], lengths, strict=False)
    shown = [message for message, at in places if at < _SHOWN_OF_CALL]
    return Chat(call, before, shown, len(messages) - before - len(shown), answered(call.response))


def shown_length(message: Message) -> int:
    """Count the characters of a message that a page shows, and those around them."""
    texts = message.text, message.reasoning, *(tool.arguments for tool in message.tools)
    return _LEAST + sum(min(len(text), MOST) for text in texts)


@_of_call.get("")
def call_page(request: Request, found: _Found) -> Response:
    """Show a call as chat; without the page around if htmx asks, as the next pages."""
    source, call = found
    return _part(request, "call.html", run=source.current(), chat=chat_of(call))


@_of_call.get("/raw")
def raw_page(request: Request, found: _Found) -> Response:
    """Show the request and the answer as recorded, and the request as a command."""
    call, run = found[1], found[0].current()
    raw = {what: _json(body) for what, body in _bodies(call).items()}
    return _part(request, "raw.html", run=run, call=call, raw=raw, curl=_curl(run, call))


@_of_call.get("/{what}.json")
def download(found: _Found, what: str) -> Response:
    """Send the recorded request or answer as a file of text, which no browser renders."""
    body = _bodies(found[1]).get(what)
    if body is None:
        raise HTTPException(404, f"call {found[1].id} has no {what}")
    headers = {"content-disposition": f'attachment; filename="{what}.json"'}
    sent = _json(body).encode(errors="replace")
    return Response(sent, media_type="text/plain; charset=utf-8", headers=headers)


def _part(request: Request, template: str, **values: Any) -> Response:
    is_part = request.headers.get("hx-request") == "true"
    return page(request, template, is_part=is_part, **values)


def _bodies(call: Call) -> dict[str, Json]:
    bodies = {"request": call.request, "answer": call.response}
    return {what: body for what, body in bodies.items() if body is not None}


def _json(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, indent=2)


def _curl(run: Json, call: Call) -> str:
    """Return the request as a shell command that the run's gateway answers."""
    urls = (run["config"].get("gateway") or {}).get("urls") or ["http://127.0.0.1:8000"]
    body = json.dumps(call.request or {}, ensure_ascii=False)
    data = shlex.quote(body) if len(body) <= MOST else "@request.json"
    return (
        f"curl {urls[0]}/v1/{path_of(call)} \\\n"
        '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n'
        f'  -H "Content-Type: application/json" \\\n  -d {data}\n'
    )


# ---- tokens

_PAGE = 2000  # tokens
_LOGPROBS = (-4.0, -2.0, -1.0, -0.5, -0.1, -0.01)


@dataclass(frozen=True)
class _Scale:
    """How tokens are colored by a column of ``CallTokens``: the bounds between the steps, and the
    ``colors`` of tokens.css. A version has a color of its own."""

    title: str
    form: str
    colors: str
    bounds: tuple[float, ...] = ()


_SCALES = {
    "sampler": _Scale("Sampler's log-prob", ".4f", "rare", _LOGPROBS),
    "trainer": _Scale("Trainer's log-prob", ".4f", "rare", _LOGPROBS),
    "ratio": _Scale("Ratio", ".5g", "side", (0.8, 0.9, 0.99, 1.01, 1.1, 1.25)),
    "advantage": _Scale("Advantage", "+.4g", "side", (-1.0, -0.3, -1e-9, 1e-9, 0.3, 1.0)),
    "version": _Scale("Adapter version", "d", "kind"),
}


@_of_call.get("/tokens")
def tokens_page(request: Request, found: _Found, color: str = "sampler", at: int = 0) -> Response:
    """Show what is known of each token, colored by one of it; and where the prompt comes from."""
    source, call = found
    vocabulary, seen = Vocabulary(fault="the store does not say which model answered"), None
    if source.id is not None:
        vocabulary, seen = _vocabulary(request, source), read_call(source.folder, call)
    start = max(at, 0) // _PAGE * _PAGE
    known = call_tokens(call, seen, vocabulary, slice(start, start + _PAGE))
    color = color if color in known.columns else "sampler"
    values, columns = known.columns[color], _columns(known, start)
    rows = list(zip(*columns.values(), strict=True))
    titles = (
        "\n".join(f"{k} {v}" for k, v in zip(columns, row, strict=True) if k != "text")
        for row in rows
    )
    pages = {"Previous": start - _PAGE, "Next": start + _PAGE}
    return _part(
        request, "token_view.html", run=source.current(), call=call, vocabulary=vocabulary,
        prompt=_prompt(source, call, vocabulary), start=start, color=color,
        colors={name: _SCALES[name].title for name in known.columns},
        legend=_legend(color, values),
        shown=list(zip(known.texts, _classes(color, values), titles, strict=True)),
        names=list(columns), rows=rows,
        pages={title: to for title, to in pages.items() if 0 <= to < len(call.response_ids)},
    )  # fmt: skip


def _columns(known: CallTokens, start: int) -> dict[str, Sequence[Any]]:
    """Return what is known of each token as text, by name."""
    columns: dict[str, Sequence[Any]] = {
        "token": range(start + 1, start + 1 + len(known.ids)), "text": known.texts, "id": known.ids
    }  # fmt: skip
    for name, column in known.columns.items():
        columns[name] = [format(value, _SCALES[name].form) for value in column.tolist()]
    return columns | ({"alternatives": known.alternatives} if any(known.alternatives) else {})


def _vocabulary(request: Request, run: OpenRun) -> Vocabulary:
    return request.app.state.vocabularies.of(run.row["config"])


def _classes(color: str, values: NDArray[Any]) -> list[str]:
    """Return the class of each value's color."""
    scale = _SCALES[color]
    steps = np.digitize(values, scale.bounds) if scale.bounds else values % 7
    return [f"{scale.colors}{step}" for step in steps]


def _legend(color: str, values: NDArray[Any]) -> list[tuple[str, str]]:
    """Return class and meaning of each color."""
    scale = _SCALES[color]
    if not scale.bounds:
        versions = np.unique(values)
        return list(zip(_classes(color, versions), map(str, versions), strict=True))
    bounds = [f"{round(bound, 6) + 0.0:g}" for bound in scale.bounds]
    between = [a if a == b else f"{a} to {b}" for a, b in pairwise(bounds)]
    said = [f"below {bounds[0]}", *between, f"{bounds[-1]} up"]
    return [(f"{scale.colors}{step}", text) for step, text in enumerate(said)]


def _prompt(source: OpenRun, call: Call, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the prompt in two parts: what ``parent``, an earlier call, has had, and the rest."""
    earlier: list[Call] = []
    if call.attempt_id is not None:
        earlier = source.store.calls(attempt_ids=[call.attempt_id], bodies=False)
    parent, shared = origin_of(call, earlier)
    texts = map(vocabulary.text, (call.prompt_ids[:shared], call.prompt_ids[shared:]))
    return {"parent": parent, "count": shared, "texts": list(texts)}


# ---- replays: what would another adapter version, the base model or a judge have said?


@router.get("/runs/{name}/calls/{call_id}/replay")
def replay_page(request: Request, name: str, call_id: str) -> Response:
    run, call = run_of(request, name), _find(request, name, call_id)[1]
    last = _replayer(request).last
    form = {
        "model": last.target.name if last and last.call_id == call.id else "",
        "temperature": call.params.get("temperature", 1.0),
        "max_tokens": call.params.get("max_tokens") or max(len(call.response_ids), 256),
        "seed": call.params.get("seed") or "",
    }
    return _replays(request, run, call, form)


def _replays(
    request: Request, run: OpenRun, call: Call, form: Mapping[str, Any], fault: str = ""
) -> Response:
    """Show the form with what it held, what is wrong with it, and the answers."""
    replayer = _replayer(request)
    return page(
        request, "replay.html", 400 if fault else 200, run=run.current(), call=call, form=form,
        fault=fault, last=replayer.last, warm=replayer.is_warm, targets=list(targets(run.folder)),
        vocabulary=_vocabulary(request, run), answers=[call, *replays_of(run.folder, call.id)],
    )  # fmt: skip


@router.post("/runs/{name}/calls/{call_id}/replay")
def start_replay(request: Request, name: str, call_id: str, form: Form) -> Response:
    run, call = run_of(request, name), _find(request, name, call_id)[1]
    given = dict.fromkeys(("model", *Sampling.model_fields), "") | form
    target = targets(run.folder).get(given["model"])
    if target is None:
        fault = "model: choose one of the list; versions not kept are gone"
        return _replays(request, run, call, given, fault)
    try:
        fields = {key: text for key, text in form.items() if text and key != "model"}
        _replayer(request).start(run.folder, call, target, Sampling.model_validate(fields))
    except ValidationError as error:
        return _replays(request, run, call, given, explain(error, Sampling))
    except ConfigError as error:
        return _replays(request, run, call, given, str(error))
    return RedirectResponse(request.url.path, 303)


def _replayer(request: Request) -> Replayer:
    return request.app.state.replayer


for _place in ("runs", "served"):
    router.include_router(_of_call, prefix=f"/{_place}/{{name}}/calls/{{call_id}}")
