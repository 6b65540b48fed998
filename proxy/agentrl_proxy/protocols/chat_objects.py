"""Write OpenAI's chat completion objects, whole and in chunks, and define what a dialect is.

Inside the gateway and in the store every answer is a chat completion. A ``Dialect`` writes it in
the client's protocol: ``ChatDialect`` as it is; completions.py, responses.py and messages.py have
the others. Does not know how tokens are sampled or recorded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from agentrl_proxy.errors import ApiError, Names
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply


@dataclass(slots=True)
class Heading:
    """The fields that every object and chunk of one answer repeats."""

    id: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # some protocols report it before the first token
    prompt_ids: Sequence[int] | None = None  # if the client wants token ids

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

    def chunk(self, heading: Heading, choice: dict[str, Any]) -> bytes:
        """Write a piece of a streamed answer; ``choice`` is that of a chat completion chunk."""
        ...

    def end(self, response: dict[str, Any]) -> bytes:
        """Write what follows the last chunk. ``response`` is the whole chat completion."""
        ...

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a chat completion as the protocol's JSON body."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Write the event that ends a failed stream."""
        ...


class ChatDialect:
    """Writes chat completions as they are."""

    id_prefix = "chatcmpl-"
    names: Names = ()
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: Mapping[str, Any]) -> None:
        options: Mapping[str, Any] = request.get("stream_options") or {}
        self._include_usage = bool(options.get("include_usage"))

    def chunk(self, heading: Heading, choice: dict[str, Any]) -> bytes:
        said = heading.fields(self.chunk_kind)
        if "token_ids" in choice:
            said["prompt_token_ids"] = heading.prompt_ids
        said["choices"] = [choice]
        return sse(said)

    def end(self, response: dict[str, Any]) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._include_usage or not response["usage"]:  # not every provider reports it
            return done
        said = heading_of(response).fields(self.chunk_kind)
        return sse({**said, "choices": [], "usage": response["usage"]}) + done

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        return response if response["usage"] else {**response, "usage": None}

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())


class BlockEvents(ABC):
    """A dialect that streams an answer's blocks, one after another: reasoning, text or a tool call.

    Anthropic's and the Responses API name and write the events that open, extend and close a block
    differently (messages.py, responses.py); their order is the same.
    """

    text_kind: str
    call_kind: str

    def __init__(self) -> None:
        self._heading: Heading | None = None  # once the stream has begun
        self._index = 0  # of the open block, else of the next
        self._kind = ""  # of the open block

    def chunk(self, heading: Heading, choice: dict[str, Any]) -> bytes:
        delta, out = choice["delta"], b""
        if self._heading is None:
            self._heading = heading
            out = self._start(heading)
        out += self._think(delta)
        if delta.get("content"):
            out += self._switch(self.text_kind) + self._extend(delta["content"], choice)
        for call in delta.get("tool_calls") or ():
            if "id" in call:  # the first piece of a call
                out += self._open(self.call_kind, call)
            if arguments := call["function"].get("arguments"):
                out += self._extend(arguments, choice)
        return out

    def _switch(self, kind: str) -> bytes:
        """Open a block of this kind unless one is open."""
        return b"" if self._kind == kind else self._open(kind)

    def _open(self, kind: str, said: dict[str, Any] | None = None) -> bytes:
        """Close the open block and begin another; ``said`` is the first piece of a tool call."""
        out = self._close()
        self._kind = kind
        return out + self._opened(said or {})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        out = self._closed()
        self._kind = ""
        self._index += 1
        return out

    @abstractmethod
    def _start(self, heading: Heading) -> bytes:
        """Write the events before the first block."""

    @abstractmethod
    def _think(self, delta: dict[str, Any]) -> bytes:
        """Write the reasoning of a delta, which may have none."""

    @abstractmethod
    def _opened(self, said: dict[str, Any]) -> bytes:
        """Write how the open block begins."""

    @abstractmethod
    def _extend(self, text: str, choice: dict[str, Any]) -> bytes:
        """Write the next text, reasoning or arguments of the open block."""

    @abstractmethod
    def _closed(self) -> bytes:
        """Write how the open block ends."""


def event(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))


def sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


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
        response.get("prompt_token_ids"),
    )


def choice(
    index: int,
    finish_reason: str | None = None,
    logprobs: list[dict[str, Any]] | None = None,
    **said: Any,
) -> dict[str, Any]:
    """Return a choice: with ``message`` that of a completion, with ``delta`` that of a chunk."""
    return {
        "index": index,
        **said,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": finish_reason,
    }


def entries_of(choice: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the log-probs of a choice's tokens, if it has them."""
    return None if choice["logprobs"] is None else choice["logprobs"]["content"]


def message(reply: ParsedReply) -> dict[str, Any]:
    """Return the assistant's message."""
    out: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        out["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        out["content"] = reply.content or None
        out["tool_calls"] = [call.as_dict() for call in reply.tool_calls]
    return out


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
    if reply.tool_calls:
        calls = enumerate(reply.tool_calls, reply.first_call)
        delta["tool_calls"] = [{"index": i, **call.as_dict()} for i, call in calls]
    return delta


def last_chunk(dialect: Dialect, heading: Heading, whole: dict[str, Any]) -> bytes:
    """Write how a choice ended, and its token ids if the client asked for them."""
    last = choice(whole["index"], whole["finish_reason"], delta={})
    if "token_ids" in whole:
        last["token_ids"] = whole["token_ids"]
    return dialect.chunk(heading, last)


def replayed(dialect: Dialect, response: dict[str, Any]) -> Iterator[bytes]:
    """Write whole choices as a stream, without its end."""
    heading = heading_of(response)
    for one in response["choices"]:
        index = one["index"]
        text = {k: v for k, v in one["message"].items() if k != "tool_calls"}
        yield dialect.chunk(heading, choice(index, None, entries_of(one), delta=text))
        if calls := one["message"].get("tool_calls"):
            delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
            yield dialect.chunk(heading, choice(index, delta=delta))
        yield last_chunk(dialect, heading, one)


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
        if hidden or token_id not in renderer.hidden:
            entry = _token(renderer, token_id, logprobs[i])
            top = tops[i] if i < len(tops) else ()
            entry["top_logprobs"] = [_token(renderer, *pair) for pair in top]
            entries.append(entry)
    return entries


def _token(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    data = renderer.token_bytes(token_id)
    logprob = max(logprob, -9999.0)  # OpenAI's stand-in for minus infinity, which JSON lacks
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
