"""Define a parsed reply: content, reasoning and tool calls, whole or a piece of a stream."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model spelled it
    # Tool results refer to it, and a stream needs it before the call is complete.
    id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of a streamed call. Its first piece has the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """Merge pieces into one for each call: SDKs expect no two of one index in a chunk."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        first = calls.get(piece.index)
        if first is not None:
            piece = replace(first, arguments=first.arguments + piece.arguments)
        calls[piece.index] = piece
    return list(calls.values())


@dataclass(slots=True)
class ParsedReply:
    """A whole reply, or a piece of one, whose calls are in ``pieces``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    pieces: list[CallPiece] = field(default_factory=list[CallPiece])

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.pieces)
