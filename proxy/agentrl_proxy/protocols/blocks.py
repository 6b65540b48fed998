"""Write an answer as events that open, extend and close its blocks, one after another.

A block is reasoning, text or a tool call. Anthropic's and the Responses API name and write the
blocks differently (messages.py, responses.py); their order is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from agentrl_proxy.protocols.chat_objects import Heading


class BlockEvents(ABC):
    """The state of a stream of blocks, and the order of its events."""

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
