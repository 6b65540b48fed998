"""The answer that somebody else's stream of chunks adds up to.

Knows the shape of chat completion chunks. Does not know LiteLLM, providers or the store.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.protocols import chat_objects


class Gathered:
    """The answer that a stream's chunks add up to."""

    def __init__(self, heading: chat_objects.Heading) -> None:
        self._heading = heading
        self._choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] | None = None
        self.said: dict[str, Any] = {}  # the provider's own id and model

    def add(self, chunk: dict[str, Any]) -> None:
        self.said = {**self.said, **{k: chunk[k] for k in ("id", "model") if chunk.get(k)}}
        self.usage = chunk.get("usage") or self.usage
        if chunk.get("system_fingerprint"):
            self._heading.fingerprint = chunk["system_fingerprint"]
        for choice in chunk.get("choices", ()):
            index = choice.get("index", 0)
            whole = self._choices.setdefault(
                index, {"index": index, "message": {"role": "assistant", "content": None}}
            )
            _merge(whole["message"], choice.get("delta") or {})
            if choice.get("logprobs"):
                _merge(whole.setdefault("logprobs", {}), choice["logprobs"])
            if choice.get("finish_reason"):
                whole["finish_reason"] = choice["finish_reason"]

    def response(self) -> dict[str, Any]:
        choices = [complete(self._choices[i]) for i in sorted(self._choices)]
        return chat_objects.completion(self._heading, choices, self.usage or {})


def _merge(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a streamed piece: text grows, lists grow (by ``index`` where they have one)."""
    for key, value in delta.items():
        old = whole.get(key)
        if key == "thinking_blocks" and isinstance(value, list):
            whole[key] = _thoughts([*(old or ()), *value])
            continue
        if old is None or key in ("role", "id", "type", "name", "index"):
            if isinstance(value, list):
                whole[key] = old = []
                _extend(old, value)
            else:
                whole[key] = dict(value) if isinstance(value, dict) else value
        elif isinstance(old, str) and isinstance(value, str):
            whole[key] = old + value
        elif isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            _extend(old, value)
        else:
            whole[key] = value


def _thoughts(pieces: list[Any]) -> list[Any]:
    """LiteLLM's pieces of Anthropic's thinking as blocks: text in many, a signature in the last."""
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


def _extend(whole: list[Any], pieces: list[Any]) -> None:
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        same = [old for old in whole if index is not None and old.get("index") == index]
        if same:
            _merge(same[0], piece)
        else:
            begun: dict[str, Any] = {}
            _merge(begun, piece) if isinstance(piece, dict) else None
            whole.append(begun if isinstance(piece, dict) else piece)


def complete(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with every field that OpenAI's clients, and our replays, look for."""
    message = choice["message"]
    if message.get("tool_calls"):
        calls = [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    return {"logprobs": None, "finish_reason": None, **choice, "message": message}
