"""The text of a reply, read into content, tool calls and reasoning, in pieces or at once.

Knows response templates (transformers >= 5.13) and the tool calls of OpenAI's wire format. Does
not know tokens or HTTP. Fed in pieces or whole, a reply reads the same: both run this one parser.

Content, reasoning and the arguments of tool calls written as JSON stream. A call that turns out
malformed is text, from where it began to the end of the reply; calls before it stay calls. What of
it has been shown by then cannot be unsent: it stays an unfinished call in a streamed message
(``withdrawn``), whose content has the text as well, and whose finish reason does not ask for
calls. Calls in other notations are held back to the end of the reply, as they are known only then.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from agentrl_proxy.rendering.partial_json import CallReader

# Whether the request offers tools, or the tools: their schemas give types to untyped notations.
Tools = bool | list[dict[str, Any]]

_REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
_TEXT_FIELDS = _REASONING_FIELDS | {"content"}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model spelled it
    # Tool results name it. Made here, as a stream needs it before the call is complete.
    id: str = field(default_factory=_call_id, compare=False)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a stream says next about one call. The first piece of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """One piece for each call: SDKs that add up deltas by index expect no two in one chunk."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        first = calls.get(piece.index)
        if first is not None:
            piece = replace(first, arguments=first.arguments + piece.arguments)
        calls[piece.index] = piece
    return list(calls.values())


@dataclass(slots=True)
class ParsedReply:
    """A whole reply, or a piece of one: then ``pieces`` are of its calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    pieces: list[CallPiece] = field(default_factory=list[CallPiece])

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.pieces)


class ReplyTemplate:
    """A response template made ready: with tool calls, and without for requests that offer none.

    Args:
        spec: the response template.
        prefill: what the chat template already wrote of the reply ("<think>\\n", with some).
    """

    def __init__(self, spec: dict[str, Any], prefill: str) -> None:
        self._spec = spec
        self.prefill = prefill
        self._prefilled = bool(_after_anchor(spec, prefill).strip())
        self._loaded: dict[bool, Any] = {}
        self.streams_calls = _is_json_call(spec["fields"].get("tool_calls"))
        # Most replies contain no delimiter at all: with none of the first characters in the text
        # there is nothing to parse. "" disables the shortcut (a pattern could start anywhere).
        self.plain_without = "" if self._prefilled else _first_characters(spec)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """What opens and closes reasoning, where the template has literals for it."""
        for name, part in self._spec["fields"].items():
            opened, closed = _literal(part, "open"), _literal(part, "close")
            if name in _REASONING_FIELDS and opened and closed:
                return opened, closed
        return None

    def stream(self, tools: Tools) -> Any:
        """transformers' parser, at the start of a reply."""
        from transformers.utils.chat_parsing import ResponseParser

        # A notation without types has its arguments cast by the tools' schemas.
        schemas: list[Any] | None = None
        if isinstance(tools, list) and not self.streams_calls:
            schemas = tools
        return ResponseParser(self.loaded(bool(tools)), prefix=self.prefill, tools=schemas)

    def loaded(self, tools: bool) -> Any:
        """The template, compiled: with tool calls or without."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        loaded = self._loaded.get(tools)
        if loaded is None:
            spec = self._spec
            if not tools:
                fields = {k: v for k, v in spec["fields"].items() if k in _TEXT_FIELDS}
                spec = {**spec, "fields": fields}
            elif self.streams_calls:
                spec = {**spec, "fields": {**spec["fields"], "tool_calls": _as_written(spec)}}
            loaded = self._loaded[tools] = load_response_template(spec)
        return loaded


class _OpenCall:
    """The call that is being written.

    Args:
        begin: where its delimiter begins in the reply.
    """

    def __init__(self, name: str | None, begin: int) -> None:
        self.id = _call_id()
        self.begin = begin
        self.reader = CallReader(name)


class ReplyParser:
    """Reads one reply. ``feed`` returns what may be shown now, ``finish`` the whole reply.

    Args:
        one_call: the reply ends where a second call begins, see ``ended_at``. For notations that
            tell calls apart while they are written (``ReplyTemplate.streams_calls``).
    """

    def __init__(self, format: ReplyTemplate, *, tools: Tools, one_call: bool = False) -> None:
        self._one_call = one_call
        self.ended_at = -1  # where in the text the second call began that was one too many
        self._format = format
        self._tools = tools
        self._stream: Any = None  # made on the first text that could be more than plain
        self._raw = ""
        self._read_to = 0  # in raw: no call begins before this
        self._content = ""  # all of it, held back or not
        self._before_calls = -1  # length of the content before the first call
        self._reasoning = ""
        self._thought = ""  # as written, since it began
        self._calls: list[ToolCall] = []
        self._values: list[Any] = []  # calls of notations that do not stream
        self._open: _OpenCall | None = None
        self._shown = ParsedReply()
        self._shown_calls: list[ToolCall] = []
        self._holding = False
        self._malformed = False
        self._in_plain = bool(format.plain_without)

    @property
    def withdrawn(self) -> list[ToolCall]:
        """Calls that ``feed`` has begun to show and that ``finish`` found to be none."""
        return self._shown_calls[len(self._calls) :]

    def feed(self, text: str) -> ParsedReply:
        """Takes the next piece; returns what has become certain."""
        if self.ended_at >= 0:
            return ParsedReply()
        self._raw += text
        if self._in_plain and not any(char in text for char in self._format.plain_without):
            # Whitespace at the end could belong to a tool call that follows.
            content, shown = self._raw.rstrip(), len(self._shown.content)
            self._content = self._shown.content = content
            return ParsedReply(
                content[shown:], "", [], []
            )  # as ``_show`` does, for most pieces of all
        if self._in_plain:
            self._in_plain = False
            self._content, text = "", self._raw
        if not self._malformed:
            try:
                self._take(self._started().feed(text))
            except ValueError:
                self._malformed = True
        return self._show()

    def finish(self) -> ParsedReply:
        """The whole reply. What ``feed`` did not show yet is in ``remainder``."""
        if self._in_plain:
            return ParsedReply(content=self._raw)
        if not self._malformed and self.ended_at < 0:
            try:
                self._take(self._started().finalize()[1])
                self._calls += [_tool_call(value) for value in self._values]
            except (ValueError, TypeError, KeyError):
                self._malformed = True
        if self._malformed:
            if not self._format.streams_calls:
                return self._as_text()
            if self._open is not None:
                self._content += self._raw[self._open.begin :]
        elif self._calls and self._before_calls >= 0:
            # The line end after the last call is no content.
            kept = self._before_calls
            self._content = self._content[:kept] + self._content[kept:].rstrip()
        return ParsedReply(self._content, self._reasoning.rstrip(), self._calls)

    @property
    def text(self) -> str:
        """What was read, up to where the reply ended."""
        return self._raw if self.ended_at < 0 else self._raw[: self.ended_at].rstrip()

    def remainder(self, whole: ParsedReply) -> ParsedReply:
        """What of the whole reply has not been shown."""
        pieces = [
            piece
            for index, call in enumerate(whole.tool_calls)
            if (piece := self._piece(index, call)) is not None
        ]
        return ParsedReply(
            whole.content[len(self._shown.content) :],
            whole.reasoning[len(self._shown.reasoning) :],
            pieces=pieces,
        )

    def _started(self) -> Any:
        if self._stream is None:
            self._stream = self._format.stream(self._tools)
        return self._stream

    def _as_text(self) -> ParsedReply:
        """A malformed call: read again as if there were no tools, so the raw text is content."""
        self._calls = []
        plain = ReplyParser(self._format, tools=False)
        plain._in_plain = False
        plain.feed(self._raw)
        return plain.finish()

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind, name = event["type"], event["field"]
            if name == "content":
                if kind == "region_chunk":
                    text = event["text"]
                    if self._reasoning and not self._content:
                        text = text.lstrip()  # the blank line between thinking and answer
                    self._content += text
            elif name in _REASONING_FIELDS:
                if kind == "region_chunk":
                    text = event["text"]
                    self._thought += text
                    self._reasoning += text if self._reasoning else text.lstrip()
                elif kind == "region_close":
                    self._pass_over(self._thought)
                    self._thought = ""
            elif name != "tool_calls":
                continue  # marks that say nothing
            elif self._format.streams_calls:
                self._take_call(event)
                if self._malformed or self.ended_at >= 0:
                    return
            else:
                self._holding = True
                if self._before_calls < 0:
                    self._before_calls = len(self._content)
                if kind == "region_close":
                    value = event["value"]
                    self._values += value if isinstance(value, list) else [value]

    def _take_call(self, event: dict[str, Any]) -> None:
        if event["type"] == "region_open":
            if self._before_calls < 0:
                self._before_calls = len(self._content)
            opening = self._format.loaded(True).fields["tool_calls"].open_re
            found = opening.search(self._raw, self._read_to)
            assert found is not None  # the parser has just seen it
            if self._one_call and self._calls:
                self.ended_at = found.start()
                return
            self._open = _OpenCall(found.groupdict().get("name"), found.start())
            self._read_to = found.end()
            return
        call = self._open
        assert call is not None
        try:
            if event["type"] == "region_chunk":
                call.reader.feed(event["text"])
            else:
                self._calls.append(ToolCall(*call.reader.finish(), call.id))
                self._pass_over(call.reader.text)
                self._open = None
        except ValueError:
            self._malformed = True

    def _pass_over(self, text: str) -> None:
        """No call begins before the end of this text, which has been read."""
        self._read_to = max(self._raw.find(text, self._read_to), self._read_to) + len(text)

    def _show(self) -> ParsedReply:
        if self._holding or self._malformed:
            return ParsedReply()
        # Whitespace at its end is no part of the reasoning, unless more follows; nor of the
        # content after a call.
        reasoning, content = self._reasoning.rstrip(), self._content
        kept = self._before_calls
        if kept >= 0:
            content = content[:kept] + content[kept:].rstrip()
        shown = self._shown
        piece = ParsedReply(content[len(shown.content) :], reasoning[len(shown.reasoning) :])
        shown.content, shown.reasoning = content, reasoning
        calls = self._calls
        if self._open is not None:
            reader = self._open.reader
            if reader.name and reader.arguments:
                calls = [*calls, ToolCall(reader.name, reader.arguments, self._open.id)]
        for index in range(max(len(self._shown_calls) - 1, 0), len(calls)):
            more = self._piece(index, calls[index])
            if more is not None:
                piece.pieces.append(more)
                self._shown_calls[index:] = [calls[index]]
        return piece

    def _piece(self, index: int, call: ToolCall) -> CallPiece | None:
        """What has not been shown of a call, now that this much of it is known."""
        if index >= len(self._shown_calls):
            return CallPiece(index, call.arguments, call.id, call.name)
        rest = call.arguments[len(self._shown_calls[index].arguments) :]
        return CallPiece(index, rest) if rest else None


def _is_json_call(field: dict[str, Any] | None) -> bool:
    """Whether calls are plain JSON, by one of the two shapes that CallReader knows."""
    if field is None or field.get("content") != "json" or field.get("content_args"):
        return False
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    named = {"name": "{name}", "arguments": "{content}"}
    return bool(field.get("repeats")) and function in ("{content}", named)


def _as_written(spec: dict[str, Any]) -> dict[str, Any]:
    """The template's tool calls, told apart but not parsed."""
    calls = dict(spec["fields"]["tool_calls"])
    # A named group must be used by a transform, or the template is refused.
    transform = {"name": "{name}"} if calls["transform"]["function"] != "{content}" else "{content}"
    return {**calls, "content": "text", "transform": transform}


class PlainTextParser:
    """A ReplyParser for text that is no message."""

    def __init__(self) -> None:
        self.text = ""
        self.ended_at = -1
        self.withdrawn: list[ToolCall] = []

    def feed(self, text: str) -> ParsedReply:
        self.text += text
        return ParsedReply(content=text)

    def finish(self) -> ParsedReply:
        return ParsedReply(content=self.text)

    def remainder(self, whole: ParsedReply) -> ParsedReply:
        return ParsedReply()


Parser: TypeAlias = ReplyParser | PlainTextParser


def _tool_call(value: Any) -> ToolCall:
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    if isinstance(arguments, str):  # some models quote their JSON; it must still be an object
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments are not an object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _literal(part: dict[str, Any], key: str) -> str:
    """The first of a field's literal delimiters; "" if it has only patterns."""
    literals: Any = part.get(key) or [""]
    return literals if isinstance(literals, str) else literals[0]


def _after_anchor(spec: dict[str, Any], prefill: str) -> str:
    """What the chat template wrote after the start of the assistant's message."""
    anchors = spec.get("start_anchor", [])
    for anchor in [anchors] if isinstance(anchors, str) else anchors:
        _, found, rest = prefill.rpartition(anchor)
        if found:
            return rest
    return prefill


def _first_characters(spec: dict[str, Any]) -> str:
    found = ""
    for part in spec["fields"].values():
        for key in ("open", "close"):
            literals = part.get(key, [])
            for literal in [literals] if isinstance(literals, str) else literals:
                found += literal[0]
            pattern = part.get(f"{key}_pattern")
            if pattern is not None:
                start = pattern.removeprefix(r"\s*").lstrip("\\(?:")
                if not start or start[0] not in "<[{|":
                    return ""
                found += start[0]
    return "".join(sorted(set(found)))
