"""Normalize the chunks of a provider's stream, and add them up to its answer.

Knows chat completion chunks, and how providers' and LiteLLM's differ from OpenAI's. Does not know
rows. A stream has one choice: requests for several are sent without ``stream`` (see service.py).
``litellm.stream_chunk_builder`` does not serve: in 1.105.3 it drops log-probs, and makes one of
two tool calls that share an index.
"""

from __future__ import annotations

import secrets
from typing import Any

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.completions import legacy_entries, plain_entry

_REPLACED = ("role", "id", "type", "name", "index", "expires_at")


class StreamedAnswer:
    """The answer that a stream's chunks add up to."""

    def __init__(self, heading: chat_objects.Heading, index: int) -> None:
        self._heading = heading
        self._index = index  # the choice's index in the response
        self._message: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None
        self._places: dict[int, int] = {}  # the provider's index of a tool call -> ours
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
        delta = choice["delta"] = dict(choice.get("delta") or {})
        message = self._message = self._message or {"role": "assistant", "content": None}
        calls, thoughts = delta.pop("tool_calls", None), delta.pop("thinking_blocks", None)
        _merge(message, delta)
        if calls:
            whole = message.setdefault("tool_calls", [])
            delta["tool_calls"] = [self._add_call(whole, call) for call in calls]
        if thoughts:
            whole = message.setdefault("thinking_blocks", [])
            delta["thinking_blocks"] = [_add_thought(whole, block) for block in thoughts]
        if choice["logprobs"] is not None:
            self._logprobs = (self._logprobs or []) + choice["logprobs"]["content"]
        self._finish_reason = choice["finish_reason"] or self._finish_reason
        return choice

    def response(self) -> dict[str, Any]:
        """The whole chat completion, as far as it has come."""
        choices: list[dict[str, Any]] = []
        if self._message is not None:
            reason, logprobs = self._finish_reason, self._logprobs
            choices = [chat_objects.choice(self._index, self._message, reason, logprobs)]
        return chat_objects.completion(self._heading, choices, self.usage or {})

    def _add_call(self, calls: list[dict[str, Any]], piece: dict[str, Any]) -> dict[str, Any]:
        """Add a piece of a tool call. Return it with its id, name and index as OpenAI says them.

        Some providers repeat a call's id and name in every piece. Some begin a call under an index
        that had one (LiteLLM's Ollama counts anew in every chunk). A piece without a name begins
        none, whatever its id: some servers make up an id for every piece.
        """
        place, function = piece.get("index", 0), piece.get("function") or {}
        call_id, name = piece.get("id") or "", function.get("name") or ""
        arguments, index = function.get("arguments") or "", self._places.get(place)
        if index is not None:
            call = calls[index]
            known = call["id"] if call_id else call["function"]["name"]
            if not name or known == (call_id or name):
                call["function"]["arguments"] += arguments
                return {"index": index, "function": {"arguments": arguments}}
        index = self._places[place] = len(calls)
        function = {"name": name, "arguments": arguments}
        call_id = call_id or f"call_{secrets.token_hex(12)}"
        calls.append({"type": "function", "id": call_id, "function": {**function}})
        return {"type": "function", "id": call_id, "index": index, "function": function}


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
        if isinstance(old, dict) and isinstance(value, dict):
            whole[key] = {**old}
            _merge(whole[key], value)
        elif isinstance(old, str | list) and type(old) is type(value) and key not in _REPLACED:
            whole[key] = old + value
        else:
            whole[key] = value


def _add_thought(blocks: list[Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Add a piece of Anthropic's thinking blocks; the last piece of a block has the signature.
    Return it without the block's text, which LiteLLM repeats beside the signature."""
    last = blocks[-1] if blocks else {}
    if not last.get("type") == piece.get("type") == "thinking" or last.get("signature"):
        blocks.append(piece)
        return piece
    if piece.get("signature"):
        piece = {**piece, "thinking": ""}
    blocks[-1] = {
        "type": "thinking",
        "thinking": (last.get("thinking") or "") + (piece.get("thinking") or ""),
        "signature": piece.get("signature") or "",
    }
    return piece
