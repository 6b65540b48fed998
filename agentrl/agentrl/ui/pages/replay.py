"""Ask a call again: what would another adapter version, the base model or a judge have said?"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from agentrl.config.errors import ConfigError
from agentrl.gateway.on_demand import Replayer, Sampling, Target, targets
from agentrl.history.conversation import answered
from agentrl.history.replays import replay, replays_of
from agentrl.history.sources import OpenRun
from agentrl.history.vocabulary import Vocabulary
from agentrl.ui.pages.tokens import cut, show_tokens
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Call

router = APIRouter()


@router.get("/runs/{name}/calls/{call_id}/replay")
def replay_page(request: Request, name: str, call_id: str) -> Response:
    return _show(request, name, call_id)


@router.post("/runs/{name}/calls/{call_id}/replay")
async def start_replay(request: Request, name: str, call_id: str) -> Response:
    given = dict(parse_qsl((await request.body()).decode(errors="replace")))
    return await run_in_threadpool(_start, request, name, call_id, given)


@router.get("/runs/{name}/replays/{call_id}/tokens")
def replay_tokens(
    request: Request, name: str, call_id: str, color: str = "sampler", at: int = 0
) -> Response:
    run = run_of(request, name)
    call = replay(run.folder, call_id)
    if call is None:
        raise HTTPException(404, f"{call_id!r} is no replay of {name}")
    return show_tokens(request, run, call, color, at)


def _start(request: Request, name: str, call_id: str, given: dict[str, str]) -> Response:
    run, call = _call(request, name, call_id)
    known = targets(run.folder)
    try:
        target, how = _asked(known, given)
        _replayer(request).start(run.folder, call, target, how)
    except ConfigError as error:
        return _show(request, name, call_id, given, str(error), 400)
    return RedirectResponse(request.url.path, 303)


def _asked(known: dict[str, Target], given: dict[str, str]) -> tuple[Target, Sampling]:
    """Read the form.

    Raises:
        ConfigError: names the field and the fix.
    """
    target = known.get(given.get("model", ""))
    if target is None:
        raise ConfigError("model: choose one of the list; versions that are not kept are gone")
    try:
        temperature, most = float(given.get("temperature", "")), int(given.get("max_tokens", ""))
        seed = int(given["seed"]) if given.get("seed") else None
    except ValueError:
        raise ConfigError(
            "temperature is a number, max_tokens and seed are whole numbers"
        ) from None
    if not 0 <= temperature <= 2 or most < 1 or (seed is not None and not 0 <= seed < 2**63):
        raise ConfigError("temperature is from 0 to 2, max_tokens from 1 up, seed from 0 up")
    return target, Sampling(temperature, most, seed)


def _show(
    request: Request,
    name: str,
    call_id: str,
    given: dict[str, str] | None = None,
    fault: str = "",
    status: int = 200,
) -> Response:
    run, call = _call(request, name, call_id)
    replayer = _replayer(request)
    last = replayer.last
    mine = last if last and (last.run, last.call_id) == (run.name, call_id) else None
    vocabulary = None
    try:
        vocabulary = request.app.state.vocabularies.of(run.row["config"])
    except (ValueError, OSError) as error:
        fault = fault or str(error)
    params = call.params
    form = {
        "model": "",
        "temperature": str(params.get("temperature", 1.0)),
        "max_tokens": str(params.get("max_tokens") or max(len(call.response_ids), 256)),
        "seed": str(params.get("seed") or ""),
    }
    return page(
        request,
        "replay.html",
        status,
        run=run.row | {"name": run.name},
        call=call,
        fault=fault,
        form=form | (given or {}),
        targets=list(targets(run.folder)),
        replay=mine,
        busy=last if last and not last.is_over and mine is None else None,
        warm=replayer.is_warm,
        trains=run.current()["state"] == "running",
        recorded=_text(call, vocabulary),
        replays=[(one, _text(one, vocabulary)) for one in replays_of(run.folder, call_id)],
    )


def _call(request: Request, name: str, call_id: str) -> tuple[OpenRun, Call]:
    run = run_of(request, name)
    call = run.store.call(call_id)
    if call is None or call.run_id != run.id:
        raise HTTPException(404, f"{call_id!r} is no call of {name}")
    return run, call


def _replayer(request: Request) -> Replayer:
    return request.app.state.replayer


def _text(call: Call, vocabulary: Vocabulary | None) -> str:
    """Return an answer as it was sampled, or as a provider wrote it."""
    if call.response_ids and vocabulary is not None:
        return cut(vocabulary.text(call.response_ids))
    said: Any = answered(call)
    return cut(said.text if said else "")
