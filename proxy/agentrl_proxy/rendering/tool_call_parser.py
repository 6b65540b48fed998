"""Parse a reply's text into content, reasoning and tool calls, in pieces or at once.

Uses response templates (transformers >= 5.13). A reply reads the same in pieces and as a whole.

Content, reasoning and the arguments of JSON tool calls stream. A malformed call is text, from its
begin to the end of the reply; calls before it stay calls. What a stream has shown of it by then
stays an unfinished call (``withdrawn``) in the streamed message, whose content has the text as well
and whose finish reason is not "tool_calls". Calls in other notations are known at the end of the
reply only, so they do not stream.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from agentrl_proxy.rendering.partial_json import CallReader
from agentrl_proxy.rendering.reply import CallPiece, ParsedReply, ToolCall, new_call_id

# The tools, whose schemas give types to untyped notations; or whether there are any.
Tools = bool | list[dict[str, Any]]

_REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
_TEXT_FIELDS = _REASONING_FIELDS | {"content"}


class ReplyTemplate:
    """A response template, compiled with tool calls and without.

    Args:
        spec: the response template.
        prefill: the begin of the reply as the chat template wrote it, for instance "<think>\\n".
    """

    def __init__(self, spec: dict[str, Any], prefill: str) -> None:
        self._spec = spec
        self.prefill = prefill
        self._prefilled = bool(_after_anchor(spec, prefill).strip())
        self._loaded: dict[bool, Any] = {}
        self.streams_calls = _is_json_call(spec["fields"].get("tool_calls"))
        # Most replies contain no delimiter: without any of its first characters there is nothing
        # to parse. "" disables the shortcut, because a pattern could start anywhere.
        self.plain_without = "" if self._prefilled else _first_characters(spec)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The strings that open and close reasoning, if the template has literals for them."""
        for name, part in self._spec["fields"].items():
            opened, closed = _literal(part, "open"), _literal(part, "close")
            if name in _REASONING_FIELDS and opened and closed:
                return opened, closed
        return None

    def stream(self, tools: Tools) -> Any:
        """Return transformers' parser at the start of a reply."""
        from transformers.utils.chat_parsing import ResponseParser

        # The tools' schemas cast the arguments of notations without types.
        schemas: list[Any] | None = None
        if isinstance(tools, list) and not self.streams_calls:
            schemas = tools
        return ResponseParser(self.loaded(bool(tools)), prefix=self.prefill, tools=schemas)

    def loaded(self, tools: bool) -> Any:
        """Return the compiled template, with tool calls or without."""
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


class _PartialCall:
    """A tool call that is not complete. ``begin``: where its delimiter begins in the reply."""

    def __init__(self, name: str | None, begin: int) -> None:
        self.id = new_call_id()
        self.begin = begin
        self.reader = CallReader(name)


class ReplyParser:
    """Parses one reply. ``feed`` returns what may be shown now, ``finish`` the whole reply.

    Args:
        one_call: the reply ends where a second call begins, see ``ended_at``. Needs
            ``ReplyTemplate.streams_calls``.
    """

    def __init__(self, format: ReplyTemplate, *, tools: Tools, one_call: bool = False) -> None:
        self._one_call = one_call
        self.ended_at = -1  # where the excluded second call began
        self._format = format
        self._tools = tools
        self._stream: Any = None  # made at the first text that may be a delimiter
        self._raw = ""
        self._read_to = 0  # in raw; no call begins before it
        self._content = ""  # shown or not
        self._before_calls = -1  # length of the content before the first call
        self._reasoning = ""
        self._thought = ""  # the current thought as written
        self._calls: list[ToolCall] = []
        self._values: list[Any] = []  # calls of notations that do not stream
        self._open: _PartialCall | None = None
        self._shown = ParsedReply()
        self._shown_calls: list[ToolCall] = []
        self._holding = False
        self._malformed = False
        self._in_plain = bool(format.plain_without)

    @property
    def withdrawn(self) -> list[ToolCall]:
        """Calls that ``feed`` began to show and ``finish`` found malformed."""
        return self._shown_calls[len(self._calls) :]

    def feed(self, text: str) -> ParsedReply:
        """Take the next piece of text; return what has become certain."""
        if self.ended_at >= 0:
            return ParsedReply()
        self._raw += text
        if self._in_plain and not any(char in text for char in self._format.plain_without):
            # Trailing whitespace could belong to a tool call that follows.
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
        """Return the whole reply. ``remainder`` returns what ``feed`` has not shown of it."""
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
            # The line end after the last call is not content.
            kept = self._before_calls
            self._content = self._content[:kept] + self._content[kept:].rstrip()
        return ParsedReply(self._content, self._reasoning.rstrip(), self._calls)

    @property
    def text(self) -> str:
        """The text up to where the reply ended."""
        return self._raw if self.ended_at < 0 else self._raw[: self.ended_at].rstrip()

    def remainder(self, whole: ParsedReply) -> ParsedReply:
        """Return what ``feed`` has not shown of the whole reply."""
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
        """Parse again without tools, so that a malformed call is content."""
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
                continue  # a delimiter without content
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
            self._open = _PartialCall(found.groupdict().get("name"), found.start())
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
        """Note that no call begins before the end of this text."""
        self._read_to = max(self._raw.find(text, self._read_to), self._read_to) + len(text)

    def _show(self) -> ParsedReply:
        if self._holding or self._malformed:
            return ParsedReply()
        # Trailing whitespace belongs to the reasoning only if more follows. The same holds for
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
        """Return what has not been shown of a call, or None."""
        if index >= len(self._shown_calls):
            return CallPiece(index, call.arguments, call.id, call.name)
        rest = call.arguments[len(self._shown_calls[index].arguments) :]
        return CallPiece(index, rest) if rest else None


def _is_json_call(field: dict[str, Any] | None) -> bool:
    """Return whether calls are JSON in one of the two shapes that CallReader reads."""
    if field is None or field.get("content") != "json" or field.get("content_args"):
        return False
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    named = {"name": "{name}", "arguments": "{content}"}
    return bool(field.get("repeats")) and function in ("{content}", named)


def _as_written(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the template's tool-call field so that transformers delimits calls unparsed."""
    calls = dict(spec["fields"]["tool_calls"])
    # transformers refuses a template whose transform uses no named group.
    transform = {"name": "{name}"} if calls["transform"]["function"] != "{content}" else "{content}"
    return {**calls, "content": "text", "transform": transform}


class PlainTextParser:
    """A ReplyParser for text completions, which have no tool calls."""

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
    if isinstance(arguments, str):  # some models quote their JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments are not an object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _literal(part: dict[str, Any], key: str) -> str:
    """Return a field's first literal delimiter; "" if it has only patterns."""
    literals: Any = part.get(key) or [""]
    return literals if isinstance(literals, str) else literals[0]


def _after_anchor(spec: dict[str, Any], prefill: str) -> str:
    """Return what the chat template wrote after the start of the assistant's message."""
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
