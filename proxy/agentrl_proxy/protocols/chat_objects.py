"""OpenAI's chat completion objects, whole and in chunks, and what a dialect is.

Knows their fields. Does not know how tokens are sampled or recorded.

Inside, every answer is a chat completion. A ``Dialect`` says it in the protocol that the client
speaks: ``ChatDialect`` as it is; completions.py, responses.py and messages.py have the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from agentrl_proxy.errors import ApiError, Names
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.tool_call_parser import CallPiece, ParsedReply, ToolCall

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclass(slots=True)
class Heading:
    """What every object and chunk of one answer repeats."""

    id: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # said before the first token, in some protocols


class Dialect(Protocol):
    """How one answer is said. Made for one request, as some count events or keep blocks open."""

    id_prefix: str
    names: Names  # for errors: what of a chat request is called otherwise

    def chunk(
        self,
        heading: Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        """A piece of a streamed answer; ``delta`` is that of a chat completion chunk."""
        ...

    def end(self, response: dict[str, Any]) -> bytes:
        """What follows the last chunk. ``response`` is the whole chat completion."""
        ...

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """The answer as one JSON body, made of a chat completion."""
        ...

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        """The chat completion that such a body of our own model's was made of."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        ...


def message(reply: ParsedReply, withdrawn: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """The assistant's message.

    Args:
        reply: what was said.
        withdrawn: calls that a stream began and never finished: its client has them.
    """
    calls = [*reply.tool_calls, *withdrawn]
    out: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        out["reasoning_content"] = reply.reasoning
    if calls:
        out["content"] = reply.content or None
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return out


def choice(
    index: int, message: dict[str, Any], finish_reason: str, logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": finish_reason,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion(
    heading: Heading, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """The whole answer. ``usage`` is empty where somebody else's model did not tell it."""
    return {
        "id": heading.id,
        "object": "chat.completion",
        "created": heading.created,
        "model": heading.model,
        "system_fingerprint": heading.fingerprint,
        "choices": choices,
        "usage": usage,
    }


def chunk(
    heading: Heading,
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    return sse(
        {
            "id": heading.id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
            "choices": [
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": (
                        None if logprobs is None else {"content": logprobs, "refusal": None}
                    ),
                    "finish_reason": finish_reason,
                }
            ],
        }
    )


def usage_chunk(heading: Heading, usage: dict[str, int]) -> bytes:
    """The extra last chunk that stream_options.include_usage asks for."""
    return sse(
        {
            "id": heading.id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
            "choices": [],
            "usage": usage,
        }
    )


def reply_delta(reply: ParsedReply) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reply.reasoning:
        delta["reasoning_content"] = reply.reasoning
    if reply.content:
        delta["content"] = reply.content
    if reply.pieces:
        delta["tool_calls"] = [_call_piece(piece) for piece in reply.pieces]
    return delta


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def tool_call_delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {}


class ChatDialect:
    """Chat completions as they are."""

    id_prefix = "chatcmpl-"
    names: Names = ()

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    chunk = staticmethod(chunk)

    def end(self, response: dict[str, Any]) -> bytes:
        if not self._include_usage:
            return DONE
        if not response["usage"]:  # somebody else's model, and its provider did not tell
            return DONE
        return usage_chunk(heading_of(response), response["usage"]) + DONE

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        return response if response["usage"] else {**response, "usage": None}

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        return said

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())


def heading_of(response: dict[str, Any]) -> Heading:
    return Heading(
        response["id"],
        response["model"],
        response["system_fingerprint"],
        response["created"],
        response["usage"].get("prompt_tokens", 0),  # not every provider tells
    )


def replayed(dialect: Dialect, response: dict[str, Any]) -> Iterator[bytes]:
    """Whole choices as the stream that a client asked for, but for its end."""
    heading = heading_of(response)
    for one in response["choices"]:
        text = {k: v for k, v in one["message"].items() if k != "tool_calls"}
        logprobs = None if one["logprobs"] is None else one["logprobs"]["content"]
        yield dialect.chunk(heading, one["index"], text, logprobs=logprobs)
        delta = tool_call_delta(one["message"])
        if delta:
            yield dialect.chunk(heading, one["index"], delta)
        yield last_chunk(dialect, heading, one, response.get("prompt_token_ids"))


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the answers to a request's prompts, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    choices = [choice for part in parts for choice in part["choices"]]
    choices.sort(key=lambda choice: choice["index"])
    counts = [part["usage"] for part in parts]
    said = {}
    if all(counts):
        names = ("prompt_tokens", "completion_tokens")
        said = usage(*(sum(count[name] for count in counts) for name in names))
    return {**parts[0], "choices": choices, "usage": said}


def last_chunk(
    dialect: Dialect, heading: Heading, choice: dict[str, Any], prompt_ids: Sequence[int] | None
) -> bytes:
    """How a choice ended, and its token ids where a chat client asked for them."""
    reason = choice["finish_reason"]
    if "token_ids" not in choice or not isinstance(dialect, ChatDialect):
        return dialect.chunk(heading, choice["index"], {}, finish_reason=reason)
    return sse(
        {
            "id": heading.id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
            "prompt_token_ids": prompt_ids,
            "choices": [
                {
                    "index": choice["index"],
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": reason,
                    "token_ids": choice["token_ids"],
                }
            ],
        }
    )


def logprob_entries(
    renderer: Renderer,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
    *,
    hidden: bool = False,
) -> list[dict[str, Any]]:
    """Tokens in OpenAI's format; those that carry no text (the stop token) are left out, unless
    ``hidden``: who scores a prompt finds its tokens by counting."""
    entries: list[dict[str, Any]] = []
    for i, token_id in enumerate(ids):
        if not hidden and renderer.is_hidden(token_id):
            continue
        top = tops[i] if i < len(tops) else ()
        entry = _token(renderer, token_id, logprobs[i])
        entry["top_logprobs"] = [_token(renderer, *pair) for pair in top]
        entries.append(entry)
    return entries


def _token(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    data = renderer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(data),
    }
