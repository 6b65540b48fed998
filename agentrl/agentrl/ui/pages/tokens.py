"""The tokens of a call: each colored by what is known of it, a page by itself and a part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.history.sources import OpenRun
from agentrl.history.tokens import SCALES, CallTokens, Token, call_tokens, origin_of, step_of
from agentrl.history.vocabulary import Vocabulary
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Call

router = APIRouter()

_PAGE = 2000  # tokens
_SHOWN = 12_000  # characters of an answer, or of each part of a prompt
_TITLES = {
    "sampler": "Sampler's log-prob",
    "trainer": "Trainer's log-prob",
    "difference": "Trainer − sampler",
    "ratio": "Ratio trainer / sampler",
    "advantage": "Advantage",
    "version": "Adapter version",
}
_KINDS = {"sampler": "rare", "trainer": "rare", "version": "kind"}  # else two-sided


@router.get("/runs/{name}/calls/{call_id}/tokens")
def tokens_page(
    request: Request, name: str, call_id: str, color: str = "sampler", at: int = 0
) -> Response:
    run = run_of(request, name)
    call = run.store.call(call_id)
    if call is None or call.run_id != run.id:
        raise HTTPException(404, f"calls: {call_id!r} is no call of {name}")
    return show_tokens(request, run, call, color, at)


def show_tokens(request: Request, run: OpenRun, call: Call, color: str, at: int) -> Response:
    """Answer with the tokens of a call: the part alone to htmx, else a page."""
    fault, vocabulary = "", None
    try:
        vocabulary = request.app.state.vocabularies.of(run.row["config"])
    except (ValueError, OSError) as error:
        fault = f"The texts of tokens are not known, because the model's do not load: {error}"
    start = max(at, 0) // _PAGE * _PAGE
    known = call_tokens(run, call, vocabulary, start, _PAGE)
    color = color if color in known.names else "sampler"
    ends = {
        title: f"?{urlencode({'color': color, 'at': to})}"
        for title, to in (("Previous", start - _PAGE), ("Next", start + _PAGE))
        if 0 <= to < len(call.response_ids)
    }
    return page(
        request,
        "token_view.html",
        is_part=request.headers.get("hx-request") == "true",
        run=run.row | {"name": run.name},
        call=call,
        path=request.url.path,
        loading=vocabulary is None and not fault,
        fault=fault,
        color=color,
        colors={one: _TITLES[one] for one in known.names},
        legend=_legend(color, known),
        shown=[(one, _class(color, one, known), _said(one)) for one in known.tokens],
        names=known.names,
        start=start,
        ends=ends,
        prompt=_prompt(run, call, vocabulary),
    )


def _class(color: str, token: Token, known: CallTokens) -> str:
    step = step_of(color, getattr(token, color), known.versions)
    if step is None:
        return "none"
    return f"{_KINDS.get(color, 'side')}{step % 7}"


def _legend(color: str, known: CallTokens) -> list[tuple[str, str]]:
    """Return class and meaning of each step of a scale."""
    kind = _KINDS.get(color, "side")
    if color == "version":
        return [(f"kind{i % 7}", str(one)) for i, one in enumerate(known.versions)]
    bounds = [f"{bound:g}" for bound in SCALES[color]]
    if color == "advantage":  # its middle is 0 alone
        bounds[2:4] = ["0", "0"]
    said = [f"below {bounds[0]}", *(f"{a} to {b}" for a, b in pairwise(bounds)), f"{bounds[-1]} up"]
    said = ["0" if one == "0 to 0" else one for one in said]
    return [(f"{kind}{i}", text) for i, text in enumerate(said)]


def _said(token: Token) -> str:
    """Return all that is known of a token, in lines."""
    lines = [f"token {token.place + 1}, id {token.id}", f"sampler {token.sampler:.4f}"]
    if token.trainer is not None:
        lines += [
            f"trainer {token.trainer:.4f}",
            f"difference {token.difference:+.2g}",
            f"ratio {token.ratio:.5g}",
            f"advantage {token.advantage:+.4g}",
        ]
    if token.version >= 0:
        lines.append(f"adapter version {token.version}")
    lines += [f"or {text!r} {logprob:.3f}" for text, logprob in token.alternatives]
    return "\n".join(lines)


def _prompt(run: OpenRun, call: Call, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Return the prompt in two parts: what an earlier call has had, and the rest."""
    earlier: list[Call] = []
    if call.attempt_id is not None:
        earlier = run.store.calls(attempt_ids=[call.attempt_id], bodies=False)
    origin = origin_of(call, earlier)
    ids = call.prompt_ids
    parts = (ids[: origin.shared], ids[origin.shared :])
    shared, rest = (cut(vocabulary.text(part)) if vocabulary and part else "" for part in parts)
    reason = str(call.params.get("branched") or "").replace("_", " ")
    return {"origin": origin, "count": len(ids), "shared": shared, "rest": rest, "reason": reason}


def cut(text: str) -> str:
    """Leave out the middle of a long text, and say how much."""
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]}\n[… {len(text) - _SHOWN:,} characters …]\n{text[-half:]}"
