"""Write OpenAI's chat completion objects, whole and in chunks, and define what a dialect is.

Inside the gateway every answer is a chat completion. A ``Dialect`` writes it in the client's
protocol: ``ChatDialect`` as it is; completions.py, responses_events.py and messages_events.py have
the others. Does not know how tokens are sampled or recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from agentrl_proxy.errors import ApiError, Names
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import CallPiece, ParsedReply, ToolCall

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclass(slots=True)
class Heading:
    """The fields that every object and chunk of one answer repeats."""

    id: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # some protocols report it before the first token

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Dialect(Protocol):
    """Writes one answer in a client's protocol. It belongs to one request: some dialects count
    events or keep blocks open."""

    id_prefix: str
    names: Names  # for errors: the protocol's names of chat completions' fields

    def chunk(
        self,
        heading: Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        """Write a piece of a streamed answer; ``delta`` is that of a chat completion chunk."""
        ...

    def end(self, response: dict[str, Any]) -> bytes:
        """Write what follows the last chunk. ``response`` is the whole chat completion."""
        ...

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a chat completion as the protocol's JSON body."""
        ...

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return the chat completion of a body that ``whole`` made of our own model's answer."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Write the event that ends a failed stream."""
        ...


class ChatDialect:
    """Writes chat completions as they are."""

    id_prefix = "chatcmpl-"
    names: Names = ()

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def chunk(
        self,
        heading: Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        said = None if logprobs is None else {"content": logprobs, "refusal": None}
        one = {"index": index, "delta": delta, "logprobs": said, "finish_reason": finish_reason}
        return sse({**heading.fields("chat.completion.chunk"), "choices": [one]})

    def end(self, response: dict[str, Any]) -> bytes:
        if not self._include_usage or not response["usage"]:  # not every provider reports it
            return DONE
        heading = heading_of(response).fields("chat.completion.chunk")
        return sse({**heading, "choices": [], "usage": response["usage"]}) + DONE

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        return response if response["usage"] else {**response, "usage": None}

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        return said

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())


def last_chunk(
    dialect: Dialect, heading: Heading, choice: dict[str, Any], prompt_ids: Sequence[int] | None
) -> bytes:
    """Write how a choice ended, and its token ids if a chat client asked for them."""
    reason = choice["finish_reason"]
    if "token_ids" not in choice or not isinstance(dialect, ChatDialect):
        return dialect.chunk(heading, choice["index"], {}, finish_reason=reason)
    one = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": reason}
    fields = {**heading.fields("chat.completion.chunk"), "prompt_token_ids": prompt_ids}
    return sse({**fields, "choices": [{**one, "token_ids": choice["token_ids"]}]})


def completion(
    heading: Heading, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a whole answer. ``usage`` is empty where a provider did not report it."""
    return {**heading.fields("chat.completion"), "choices": choices, "usage": usage}


def heading_of(response: dict[str, Any]) -> Heading:
    return Heading(
        response["id"],
        response["model"],
        response["system_fingerprint"],
        response["created"],
        response["usage"].get("prompt_tokens", 0),
    )


def choice(
    index: int,
    message: dict[str, Any],
    finish_reason: str | None,
    logprobs: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": finish_reason,
    }


def message(reply: ParsedReply, withdrawn: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """Return the assistant's message.

    Args:
        withdrawn: calls that a stream began and never finished: its client has them.
    """
    out: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        out["reasoning_content"] = reply.reasoning
    calls = [(call.id, call.name, call.arguments) for call in (*reply.tool_calls, *withdrawn)]
    return with_tool_calls(out, calls)


def with_tool_calls(
    message: dict[str, Any], calls: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    """Add calls (id, name, arguments) to a message, whose empty content becomes null."""
    if not calls:
        return message
    written = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {**message, "content": message["content"] or None, "tool_calls": written}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def reply_delta(reply: ParsedReply) -> dict[str, Any]:
    """Return a piece of a reply as the delta of a chunk."""
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


def replayed(dialect: Dialect, response: dict[str, Any]) -> Iterator[bytes]:
    """Write whole choices as a stream, without its end."""
    heading = heading_of(response)
    for one in response["choices"]:
        text = {k: v for k, v in one["message"].items() if k != "tool_calls"}
        logprobs = None if one["logprobs"] is None else one["logprobs"]["content"]
        yield dialect.chunk(heading, one["index"], text, logprobs=logprobs)
        if calls := one["message"].get("tool_calls"):
            delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
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


def logprob_entries(
    renderer: Renderer,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
    *,
    hidden: bool = False,
) -> list[dict[str, Any]]:
    """Return tokens with their log-probs as OpenAI writes them.

    Args:
        tops: the most likely tokens at each position; may be shorter than ``ids``.
        hidden: include tokens without text (the stop token), as scores of a prompt do: their
            reader counts tokens.
    """
    entries: list[dict[str, Any]] = []
    for i, token_id in enumerate(ids):
        if not hidden and renderer.is_hidden(token_id):
            continue
        entry = _token(renderer, token_id, logprobs[i])
        entry["top_logprobs"] = [
            _token(renderer, *pair) for pair in (tops[i] if i < len(tops) else ())
        ]
        entries.append(entry)
    return entries


def _token(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    data = renderer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(data),
    }
