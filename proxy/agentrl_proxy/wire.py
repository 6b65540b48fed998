"""OpenAI's chat completion objects, whole and in chunks.

Knows their fields. Does not know how tokens are sampled or recorded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl_proxy.rendering import Renderer
from agentrl_proxy.replies import Reply

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclass(slots=True)
class Heading:
    """What every object and chunk of one answer repeats."""

    id: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def message(reply: Reply) -> dict[str, Any]:
    """The assistant's message. Tool calls get the ids that the tool results will name."""
    out: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        out["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        out["content"] = reply.content or None
        out["tool_calls"] = [
            {
                "id": new_id("call_")[:29],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
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
    heading: Heading, choices: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
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


def last_chunk(heading: Heading, choice: dict[str, Any], prompt_ids: Sequence[int] | None) -> bytes:
    """How a choice ended, and its token ids where the client asked for them."""
    reason = choice["finish_reason"]
    if "token_ids" not in choice:
        return chunk(heading, choice["index"], {}, finish_reason=reason)
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


def text_delta(reply: Reply) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reply.reasoning:
        delta["reasoning_content"] = reply.reasoning
    if reply.content:
        delta["content"] = reply.content
    return delta


def tool_call_delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {}


def replayed(response: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """A whole answer as the stream that a client asked for."""
    heading = Heading(
        response["id"], response["model"], response["system_fingerprint"], response["created"]
    )
    for one in response["choices"]:
        text = {k: v for k, v in one["message"].items() if k != "tool_calls"}
        logprobs = None if one["logprobs"] is None else one["logprobs"]["content"]
        yield chunk(heading, one["index"], text, logprobs=logprobs)
        delta = tool_call_delta(one["message"])
        if delta:
            yield chunk(heading, one["index"], delta)
        yield last_chunk(heading, one, response.get("prompt_token_ids"))
    if include_usage:
        yield usage_chunk(heading, response["usage"])
    yield DONE


def logprob_entries(
    renderer: Renderer,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
) -> list[dict[str, Any]]:
    """Tokens in OpenAI's format; those that carry no text (the stop token) are left out."""
    entries: list[dict[str, Any]] = []
    for i, token_id in enumerate(ids):
        if renderer.is_hidden(token_id):
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
