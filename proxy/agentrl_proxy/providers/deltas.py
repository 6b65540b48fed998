"""A provider's streamed deltas in the form that OpenAI's have.

Knows which oddities providers' and LiteLLM's streams have. Does not know the rest of a chunk.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Begun:
    """A tool call in a stream, as its provider began it."""

    index: int  # ours
    id: str
    name: str

    def is_followed_by(self, id: str, name: str) -> bool:
        """Whether a piece with this id and name (empty: none) begins another call. One without a
        name does not, whatever its id: some servers make a new id for every piece."""
        if not name:
            return False
        return id != self.id if id else name != self.name


class Deltas:
    """A provider's deltas as OpenAI's. Some repeat a call's id and name in every piece, which would
    begin another call; some begin another call under an index that had one (LiteLLM's Ollama
    counts anew in every chunk); LiteLLM repeats a thought's whole text with its signature."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], _Begun] = {}  # the latest by choice and their index
        self._count: dict[int, int] = {}  # of calls begun, by choice
        self._thinking = set[int]()  # choices that are in the middle of a thought

    def tidied(self, delta: dict[str, Any], choice: int) -> dict[str, Any]:
        tidy = dict(delta)
        if delta.get("tool_calls"):
            tidy["tool_calls"] = [self._call(call, choice) for call in delta["tool_calls"]]
        if delta.get("thinking_blocks"):
            tidy["thinking_blocks"] = [self._thought(b, choice) for b in delta["thinking_blocks"]]
        return tidy

    def _call(self, call: dict[str, Any], choice: int) -> dict[str, Any]:
        place, function = (choice, call.get("index", 0)), call.get("function") or {}
        said_id, name = call.get("id") or "", function.get("name") or ""
        arguments = function.get("arguments") or ""
        known = self._calls.get(place)
        if known is not None and not known.is_followed_by(said_id, name):
            return {"index": known.index, "function": {"arguments": arguments}}
        index = self._count.get(choice, 0)
        self._count[choice] = index + 1
        self._calls[place] = _Begun(index, said_id, name)
        call_id = said_id or f"call_{secrets.token_hex(12)}"
        function = {"name": name, "arguments": arguments}
        return {"type": "function", "id": call_id, "index": index, "function": function}

    def _thought(self, block: dict[str, Any], choice: int) -> dict[str, Any]:
        if block.get("signature"):
            said = choice in self._thinking
            self._thinking.discard(choice)
            return {**block, "thinking": ""} if said else block
        self._thinking.add(choice)
        return block
