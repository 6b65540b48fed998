"""Normalize providers' choices, and put the chunks of a provider's stream together.

Knows chat completion chunks, and how providers' and LiteLLM's differ from OpenAI's. Does not know
rows. A stream has one choice (see service.py). ``litellm.stream_chunk_builder`` does not serve: in
1.105.3 it drops log-probs, and makes one of two tool calls that share an index.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.protocols.completions import legacy_entries, plain_entry
from agentrl_proxy.rendering.reply import new_call_id


class StreamedAnswer:
    """The answer that a stream's chunks add up to.

    Args:
        index: of its choice in the response.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._calls: dict[int, int] = {}  # our index of the latest call, by the provider's
        self.said: dict[str, Any] = {}  # the chunks' other fields: id, model, usage
        self.choices: list[dict[str, Any]] = []  # the whole choice, once it has begun
        self.held: list[bytes] = []  # chunks that the client gets when the answer is durable

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Add a chunk. Return its choice, normalized; None if it has none."""
        self.said |= {key: value for key, value in chunk.items() if value}
        if not chunk.get("choices"):
            return None
        choice = normalized(chunk["choices"][0], self._index)
        if not self.choices:
            message = {"role": "assistant", "content": None}
            self.choices = [{"finish_reason": None, "logprobs": None, "message": message}]
        [whole] = self.choices
        message, delta = whole["message"], choice["delta"]
        for key, add in (("tool_calls", self._tool_call), ("thinking_blocks", _thought)):
            if pieces := delta.pop(key, None):
                delta[key] = [add(piece, message.setdefault(key, [])) for piece in pieces]
        for key, value in delta.items():
            if key not in ("role", "tool_calls", "thinking_blocks"):
                grows = isinstance(value, str | list) and message.get(key) is not None
                message[key] = message[key] + value if grows else value
        if (logprobs := choice["logprobs"]) is not None and whole["logprobs"] is not None:
            content = whole["logprobs"]["content"] + logprobs["content"]
            logprobs = {**logprobs, "content": content}
        new = {**choice, "logprobs": logprobs}
        whole |= {k: v for k, v in new.items() if k != "delta" and v is not None}
        return choice

    def _tool_call(self, piece: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Add a piece of a tool call. Return it with the id, name and index that OpenAI would give.

        Some providers repeat a call's id and name in every piece; some make up an id for every
        piece, without a name. Some begin a call under an index that had one (LiteLLM's Ollama
        counts anew in every chunk, and LiteLLM fills in 0).
        """
        function, place = piece.get("function") or {}, piece.get("index", 0)
        call_id, name = piece.get("id"), function.get("name")
        arguments = function.get("arguments") or ""
        if (index := self._calls.get(place)) is not None:
            known = calls[index]["function"]
            if not name or (call_id == calls[index]["id"] if call_id else name == known["name"]):
                known["arguments"] += arguments
                return {"index": index, "function": {"arguments": arguments}}
        index = self._calls[place] = len(calls)
        call_id = call_id or new_call_id()
        function = {"name": name or "", "arguments": arguments}
        begun = {k: v for k, v in piece.items() if k != "index"}
        begun |= {"id": call_id, "type": "function", "function": function}
        calls.append(begun)
        return {**begun, "index": index}


def _thought(piece: dict[str, Any], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a piece of Anthropic's thinking: the last one of a block has the signature. LiteLLM
    repeats the block's whole text beside it."""
    last = blocks[-1] if blocks else {}
    if not (last.get("type") == piece.get("type") == "thinking") or last.get("signature"):
        blocks.append(dict(piece))
        return piece
    if piece.get("signature"):
        piece = {**piece, "thinking": ""}
    last["thinking"] = (last.get("thinking") or "") + (piece.get("thinking") or "")
    last["signature"] = piece.get("signature") or ""
    return piece


def normalized(choice: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a provider's choice with our index, and log-probs as chat completions have them."""
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        content = logprobs.get("content")
        if content is None and "tokens" in logprobs:
            content = legacy_entries(logprobs)
        content = [_logprob_entry(one) for one in content or ()]
        logprobs = {"refusal": None, **logprobs, "content": content}
    return {"finish_reason": None, **choice, "index": index, "logprobs": logprobs}


def _logprob_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """A log-prob entry with all its fields. Some providers give no bytes or no alternatives."""
    own, *tops = (
        {**plain_entry(one["token"], one["logprob"]), **one}
        for one in (entry, *(entry.get("top_logprobs") or ()))
    )
    return {**own, "top_logprobs": tops}
