"""Parse a reply's text into content, reasoning and tool calls, in pieces or at once.

Uses response templates (transformers >= 5.13). A reply reads the same in pieces and as a whole.

Content and reasoning stream. A JSON tool call is shown when it is complete and well-formed, because
agents act on what they were shown. A malformed call is text, from its begin to the end of the
reply; calls before it stay calls. Calls in other notations are known at the end of the reply only.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from agentrl_proxy.rendering.reply import (
    ParsedReply,
    ToolCall,
    json_of_gemmas,
    read_call,
    read_python_calls,
    tool_call,
)

# The tools, whose schemas give types to untyped notations; or whether there are any.
Tools = bool | list[dict[str, Any]]

_REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
_TEXT_FIELDS = _REASONING_FIELDS | {"content", "header", "next_message"}


class ReplyTemplate:
    """A response template.

    Args:
        spec: the response template.
        prefill: the begin of the reply as the chat template wrote it, for instance "<think>\\n".
    """

    def __init__(self, spec: dict[str, Any], prefill: str) -> None:
        self._spec = spec
        self.prefill = prefill
        self.streams_calls = _is_json_call(spec["fields"].get("tool_calls"))
        self.delimits_calls = not {"close", "close_pattern"}.isdisjoint(
            spec["fields"].get("tool_calls") or ()
        )
        delimiters = (spec["fields"].get("tool_calls") or {}).get("content_args") or {}
        self.is_gemmas = "string_delims" in delimiters  # read by ``json_of_gemmas``
        # Most replies contain no delimiter: without any of these first characters there is nothing
        # to parse. None disables the shortcut: the chat template wrote a part of the reply, or a
        # pattern could start anywhere.
        bare = [prefill.rpartition(anchor)[2].strip() for anchor in _literals(spec, "start_anchor")]
        self.plain_without = None if prefill and "" not in bare else _first_characters(spec)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The strings that open and close reasoning, if the template has literals for them."""
        for name, part in self._spec["fields"].items():
            opened, closed = _literals(part, "open"), _literals(part, "close")
            if name in _REASONING_FIELDS and opened and closed:
                return opened[0], closed[0]
        return None

    @cached_property
    def without_calls(self) -> ReplyTemplate:
        """The template for replies to requests without tools."""
        fields = {k: v for k, v in self._spec["fields"].items() if k in _TEXT_FIELDS}
        return ReplyTemplate({**self._spec, "fields": fields}, self.prefill)

    @cached_property
    def compiled(self) -> Any:
        """The template as transformers compiles it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = self._spec
        if self.streams_calls:
            # transformers delimits calls, and ``read_call`` reads them. transformers refuses a
            # template whose transform uses no named group.
            calls = spec["fields"]["tool_calls"]
            whole = calls["transform"]["function"] == "{content}"
            transform = "{content}" if whole else {"name": "{name}"}
            calls = {**calls, "content": "text", "transform": transform}
            spec = {**spec, "fields": {**spec["fields"], "tool_calls": calls}}
        elif self.is_gemmas:
            calls = {**spec["fields"]["tool_calls"], "content": "text", "content_args": {}}
            spec = {**spec, "fields": {**spec["fields"], "tool_calls": calls}}
        return load_response_template(spec)

    def stream(self, tools: Tools) -> Any:
        """Return transformers' parser at the start of a reply."""
        from transformers.utils.chat_parsing import ResponseParser

        # The tools' schemas cast the arguments of notations without types.
        schemas: Any = tools if isinstance(tools, list) and not self.streams_calls else None
        return ResponseParser(self.compiled, prefix=self.prefill, tools=schemas)


class ReplyParser:
    """Parses one reply. ``feed`` returns what may be shown now, ``finish`` the whole reply.

    Args:
        one_call: the reply ends where a second call begins, see ``ended_at``. Needs
            ``ReplyTemplate.streams_calls``.
    """

    def __init__(self, format: ReplyTemplate, *, tools: Tools, one_call: bool = False) -> None:
        self.ended_at = -1  # where the excluded second call began
        self._format = format = format if tools else format.without_calls
        self._tools = tools
        self._one_call = one_call
        self._stream: Any = None  # made at the first text that may be a delimiter
        self._raw = ""
        self._read_to = 0  # in raw; no call begins before it
        self._content = ""  # shown or not
        self._before_calls = -1  # length of the content before the first call
        self._reasoning = ""
        self._thought = ""  # the current thought as written
        self._thought_over = False  # the last one, which may be empty, was closed
        self._calls: list[ToolCall] = []
        self._open: str | None = None  # the text so far of the call that is not complete
        self._name: str | None = None  # its name, if that stands before the text
        self._open_at = 0  # where its delimiter begins in raw
        self._shown = ParsedReply()
        self._malformed = False
        self._marks = format.plain_without  # None once a delimiter may have begun

    @property
    def text(self) -> str:
        """The text up to where the reply ended."""
        return self._raw if self.ended_at < 0 else self._raw[: self.ended_at].rstrip()

    def feed(self, text: str) -> ParsedReply:
        """Take the next piece of text; return what has become certain."""
        if self.ended_at >= 0:
            return ParsedReply()
        if self._is_plain(text):
            # Trailing whitespace could belong to a tool call that follows. ``_show`` would do the
            # same; most pieces of all end here.
            content, shown = self._raw.rstrip(), self._shown
            piece = ParsedReply(content[len(shown.content) :], "", [])
            shown.content = content
            return piece
        return self._show()

    def finish(self, text: str = "") -> ParsedReply:
        """Take the last piece of text; return the whole reply. ``remainder`` returns what ``feed``
        has not shown of it."""
        if self.ended_at < 0 and self._is_plain(text):
            return ParsedReply(content=self._raw)
        self._parse(None)
        if self._malformed and self._tools and not self._format.streams_calls:
            # Parse again without tools, so that a malformed call is content.
            return ReplyParser(self._format, tools=False).finish(self._raw)
        if self._malformed and self._open is not None:
            self._content += self._raw[self._open_at :]
        elif not self._malformed and self._calls:
            self._content = self._certain_content()
        return ParsedReply(self._content, self._reasoning.rstrip(), self._calls)

    def remainder(self, whole: ParsedReply) -> ParsedReply:
        """Return what ``feed`` has not shown of the whole reply."""
        return self._reveal(whole.content, whole.reasoning, whole.tool_calls)

    def _is_plain(self, text: str) -> bool:
        """Take a piece of text, and parse it unless no delimiter has begun so far."""
        self._raw += text
        if self._marks is not None:
            if self._marks.isdisjoint(text):
                return True
            self._marks, text = None, self._raw
        self._parse(text)
        return False

    def _parse(self, text: str | None) -> None:
        """Parse a piece of text; None: the end."""
        if self._malformed or self.ended_at >= 0:
            return
        if self._stream is None:
            self._stream = self._format.stream(self._tools)
        try:
            events = self._stream.finalize()[1] if text is None else self._stream.feed(text)
            for event in events:
                self._take(event)
                if self.ended_at >= 0:
                    return
        except (ValueError, TypeError, KeyError):
            self._malformed = True

    def _take(self, event: dict[str, Any]) -> None:
        kind, name = event["type"], event["field"]
        if name == "tool_calls":
            if self._before_calls < 0:
                self._before_calls = len(self._content)
            if self._format.streams_calls:
                self._take_call(event)
            elif kind == "region_close":
                value = event["value"]
                for one in value if isinstance(value, list) else [value]:
                    function = one["function"]
                    if isinstance(function, str):
                        self._calls += read_python_calls(function)
                    else:
                        arguments = function.get("arguments", {})
                        if self._format.is_gemmas:
                            arguments = json_of_gemmas(arguments)
                        self._calls.append(tool_call(function["name"], arguments))
        elif name == "content" and kind == "region_chunk":
            # No blank line between thinking and answer.
            between = self._thought_over and not self._content
            self._content += event["text"].lstrip() if between else event["text"]
        elif name in _REASONING_FIELDS and kind == "region_chunk":
            text = event["text"]
            self._thought += text
            self._reasoning += text if self._reasoning else text.lstrip()
        elif name in _REASONING_FIELDS and kind == "region_close":
            self._pass_over(self._thought)
            self._thought, self._thought_over = "", True

    def _take_call(self, event: dict[str, Any]) -> None:
        if event["type"] == "region_open":
            opening = self._format.compiled.fields["tool_calls"].open_re
            found = opening.search(self._raw, self._read_to)
            assert found is not None  # the parser has just seen it
            if self._one_call and self._calls:
                self.ended_at = found.start()
                return
            self._open, self._name = "", found.groupdict().get("name")
            self._open_at, self._read_to = found.start(), found.end()
            return
        assert self._open is not None
        if event["type"] == "region_chunk":
            self._open += event["text"]
        else:
            delimited = self._format.delimits_calls
            self._calls.append(read_call(self._open, self._name, delimited=delimited))
            self._pass_over(self._open)
            self._open = None

    def _pass_over(self, text: str) -> None:
        """Note that no call begins before the end of this text."""
        self._read_to = max(self._raw.find(text, self._read_to), self._read_to) + len(text)

    def _certain_content(self) -> str:
        """The content without a line end after a call, which belongs to it only if more follows."""
        kept = self._before_calls
        return self._content if kept < 0 else self._content[:kept] + self._content[kept:].rstrip()

    def _show(self) -> ParsedReply:
        if self._malformed or (self._before_calls >= 0 and not self._format.streams_calls):
            return ParsedReply()
        # Trailing whitespace belongs to the reasoning only if more follows.
        return self._reveal(self._certain_content(), self._reasoning.rstrip(), self._calls)

    def _reveal(self, content: str, reasoning: str, calls: list[ToolCall]) -> ParsedReply:
        """Return what has not been shown of this reply. From now on it has."""
        shown, known = self._shown, len(self._shown.tool_calls)
        thought = reasoning[len(shown.reasoning) :]
        piece = ParsedReply(content[len(shown.content) :], thought, calls[known:], known)
        shown.content, shown.reasoning = content, reasoning
        shown.tool_calls += piece.tool_calls
        return piece


def _is_json_call(field: dict[str, Any] | None) -> bool:
    """Return whether calls are JSON in one of the two shapes that ``read_call`` reads."""
    if field is None or field.get("content") != "json" or field.get("content_args"):
        return False
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    named = {"name": "{name}", "arguments": "{content}"}
    return bool(field.get("repeats")) and function in ("{content}", named)


def _literals(part: dict[str, Any], key: str) -> list[str]:
    literals: Any = part.get(key) or []
    return [literals] if isinstance(literals, str) else literals


def _first_characters(spec: dict[str, Any]) -> frozenset[str] | None:
    found: set[str] = set()
    for part in spec["fields"].values():
        for key in ("open", "close"):
            found |= {literal[0] for literal in _literals(part, key)}
            pattern = part.get(f"{key}_pattern")
            if pattern is not None:
                start = pattern.removeprefix(r"\s*").lstrip("\\(?:")
                if not start or start[0] not in "<[{|":
                    return None
                found.add(start[0])
    return frozenset(found)


PLAIN_TEXT = ReplyTemplate({"fields": {}}, "")
"""Of text completions, which have neither reasoning nor tool calls."""
