"""Normalize the chunks of a provider's stream, and add them up to its answer.

Knows chat completion chunks, and how providers' and LiteLLM's differ from OpenAI's. Does not know
rows. A stream has one choice: requests for several are sent without ``stream`` (see service.py).
``litellm.stream_chunk_builder`` does not serve: in 1.105.3 it drops log-probs, and makes one of
two tool calls that share an index.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.completions import legacy_entries, plain_entry

_REPLACED = ("role", "id", "type", "name", "index", "expires_at")


class _ToolCall(NamedTuple):
    """A streamed tool call, as its provider began it."""

    place: int  # our index
    id: str
    name: str

    def is_followed_by(self, id: str, name: str) -> bool:
        """Whether a piece with this id and name (empty: none) begins another call. A piece without
        a name does not, whatever its id: some servers make up an id for every piece."""
        if not name:
            return False
        return id != self.id if id else name != self.name


class StreamedAnswer:
    """The answer that a stream's chunks add up to."""

    def __init__(self, heading: chat_objects.Heading, index: int) -> None:
        self._heading = heading
        self._index = index  # the choice's index in the response
        self._message: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None
        self._calls: dict[int, _ToolCall] = {}  # the latest, by the provider's index
        self._begun = 0  # calls
        self._thinking = False
        self.usage: dict[str, Any] | None = None
        self.said: dict[str, Any] = {}  # the provider's id and model

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Add a chunk. Return its choice, normalized; None if it has none."""
        self.said |= {name: chunk[name] for name in ("id", "model") if chunk.get(name)}
        self.usage = chunk.get("usage") or self.usage
        self._heading.fingerprint = chunk.get("system_fingerprint") or self._heading.fingerprint
        if not chunk.get("choices"):
            return None
        choice = normalized(chunk["choices"][0], self._index)
        choice["delta"] = delta = self._normalized_delta(choice.get("delta") or {})
        self._message = self._message or {"role": "assistant", "content": None}
        calls = delta.get("tool_calls") or []
        _merge(self._message, {k: v for k, v in delta.items() if k != "tool_calls"})
        for call in calls:
            self._add_call(self._message.setdefault("tool_calls", []), call)
        if choice["logprobs"] is not None:
            self._logprobs = (self._logprobs or []) + choice["logprobs"]["content"]
        self._finish_reason = choice["finish_reason"] or self._finish_reason
        entries = chat_objects.entries_of(choice)
        return chat_objects.choice(self._index, choice["finish_reason"], entries, delta=delta)

    def response(self) -> dict[str, Any]:
        """The whole chat completion, as far as it has come."""
        choices: list[dict[str, Any]] = []
        if self._message is not None:
            reason, logprobs = self._finish_reason, self._logprobs
            choices = [chat_objects.choice(self._index, reason, logprobs, message=self._message)]
        return chat_objects.completion(self._heading, choices, self.usage or {})

    def _normalized_delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Say each tool call's id, name and index as OpenAI does, and each thought once.

        Some providers repeat a call's id and name in every piece. Some begin a call under an index
        that had one (LiteLLM's Ollama counts anew in every chunk). LiteLLM repeats a thought's
        whole text beside its signature.
        """
        delta = dict(delta)
        if delta.get("tool_calls"):
            delta["tool_calls"] = [self._normalized_call(call) for call in delta["tool_calls"]]
        if delta.get("thinking_blocks"):
            delta["thinking_blocks"] = [self._thought(one) for one in delta["thinking_blocks"]]
        return delta

    def _normalized_call(self, call: dict[str, Any]) -> dict[str, Any]:
        place, function = call.get("index", 0), call.get("function") or {}
        call_id, name = call.get("id") or "", function.get("name") or ""
        arguments = function.get("arguments") or ""
        known = self._calls.get(place)
        if known is not None and not known.is_followed_by(call_id, name):
            return {"index": known.place, "function": {"arguments": arguments}}
        index, self._begun = self._begun, self._begun + 1
        self._calls[place] = _ToolCall(index, call_id, name)
        call_id = call_id or f"call_{secrets.token_hex(12)}"
        function = {"name": name, "arguments": arguments}
        return {"type": "function", "id": call_id, "index": index, "function": function}

    def _thought(self, block: dict[str, Any]) -> dict[str, Any]:
        signed = bool(block.get("signature"))
        repeated, self._thinking = signed and self._thinking, not signed
        return {**block, "thinking": ""} if repeated else block

    @staticmethod
    def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
        if piece["index"] == len(calls):
            begun = {k: v for k, v in piece.items() if k != "index"}
            calls.append({**begun, "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def normalized(choice: dict[str, Any], index: int) -> dict[str, Any]:
    """A provider's choice with an index of ours, and log-probs as chat completions have them."""
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        content = logprobs.get("content")
        if content is None and "tokens" in logprobs:
            content = legacy_entries(logprobs)
        content = [_entry(one) for one in content or ()]
        logprobs = {"refusal": None, **logprobs, "content": content}
    return {"finish_reason": None, **choice, "index": index, "logprobs": logprobs}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """A log-prob entry with all its fields. Some providers give no bytes or no alternatives."""
    tops = [_token(top) for top in entry.get("top_logprobs") or ()]
    return {**_token(entry), "top_logprobs": tops}


def _token(one: dict[str, Any]) -> dict[str, Any]:
    return {**plain_entry(one["token"], one["logprob"]), **one}


def _merge(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a streamed piece: text and lists grow, objects are merged."""
    for key, value in piece.items():
        old: Any = whole.get(key)
        if key == "thinking_blocks" and value:
            whole[key] = _thoughts([*(old or ()), *value])
        elif isinstance(old, dict) and isinstance(value, dict):
            whole[key] = {**old}
            _merge(whole[key], value)
        elif isinstance(old, str | list) and type(old) is type(value) and key not in _REPLACED:
            whole[key] = old + value
        else:
            whole[key] = value


def _thoughts(pieces: list[Any]) -> list[Any]:
    """Join the pieces of Anthropic's thinking blocks: the last one has the signature."""
    blocks: list[Any] = []
    for piece in pieces:
        last = blocks[-1] if blocks else {}
        if last.get("type") == piece.get("type") == "thinking" and not last.get("signature"):
            blocks[-1] = {
                "type": "thinking",
                "thinking": (last.get("thinking") or "") + (piece.get("thinking") or ""),
                "signature": piece.get("signature") or "",
            }
        else:
            blocks.append(piece)
    return blocks
