"""The text of a reply, read into content, tool calls and reasoning, in pieces or at once.

Knows response templates (transformers >= 5.13) and the tool calls of OpenAI's wire format. Does
not know tokens or HTTP. Fed in pieces or whole, a reply reads the same: both run this one parser.

Content streams. From the first tool call on everything is held back until the reply ends, because
a call that turns out malformed makes the raw text the content, and what was sent cannot be unsent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Copied from transformers' own server, which keeps it for Qwen 2 and 3 and Hermes-style models.
QWEN_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}

_REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(slots=True)
class Reply:
    """A whole reply, or a piece of one."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class ReplyFormat:
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
        # Most replies contain no delimiter at all: with none of the first characters in the text
        # there is nothing to parse. "" disables the shortcut (a pattern could start anywhere).
        self.plain_without = "" if self._prefilled else _first_characters(spec)

    def stream(self, *, tools: bool) -> Any:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        loaded = self._loaded.get(tools)
        if loaded is None:
            spec = self._spec
            if not tools:
                fields = {k: v for k, v in spec["fields"].items() if k != "tool_calls"}
                spec = {**spec, "fields": fields}
            loaded = self._loaded[tools] = load_response_template(spec)
        return ResponseParser(loaded, prefix=self.prefill)


class ReplyParser:
    """Reads one reply. ``feed`` returns what may be shown now, ``finish`` the whole reply."""

    def __init__(self, format: ReplyFormat, *, tools: bool) -> None:
        self._format = format
        self._tools = tools
        self._stream: Any = None  # made on the first text that could be more than plain
        self._raw = ""
        self._content = ""  # all of it, held back or not
        self._reasoning = ""
        self._calls: list[Any] = []
        self._shown = Reply()
        self._holding = False
        self._malformed = False
        self._in_plain = bool(format.plain_without)

    def feed(self, text: str) -> Reply:
        """Takes the next piece; returns what has become certain."""
        self._raw += text
        if self._in_plain and not any(char in text for char in self._format.plain_without):
            # Whitespace at the end could belong to a tool call that follows.
            kept = self._raw.rstrip()
            self._content = kept
            return self._show()
        self._in_plain = False
        if not self._malformed:
            try:
                if self._stream is None:
                    self._stream = self._format.stream(tools=self._tools)
                    self._content = ""
                    text = self._raw
                self._take(self._stream.feed(text))
            except ValueError:
                self._malformed = True
        return self._show()

    def finish(self) -> Reply:
        """The whole reply. What ``feed`` did not show yet is in ``remainder``."""
        if self._in_plain:
            return Reply(content=self._raw)
        if not self._malformed:
            try:
                if self._stream is None:  # nothing was ever fed
                    self._stream = self._format.stream(tools=self._tools)
                self._take(self._stream.finalize()[1])
                calls = [_tool_call(value) for value in self._calls]
                return Reply(self._content, self._reasoning.rstrip(), calls)
            except (ValueError, TypeError, KeyError):
                self._malformed = True
        return self._as_text()

    def remainder(self, whole: Reply) -> Reply:
        """What of the whole reply has not been shown."""
        return Reply(
            whole.content[len(self._shown.content) :],
            whole.reasoning[len(self._shown.reasoning) :],
            whole.tool_calls,
        )

    def _as_text(self) -> Reply:
        """A malformed call: read again as if there were no tools, so the raw text is content."""
        plain = ReplyParser(self._format, tools=False)
        try:
            plain._in_plain = False
            plain._stream = self._format.stream(tools=False)
            plain._take(plain._stream.feed(self._raw))
            plain._take(plain._stream.finalize()[1])
        except ValueError:
            return Reply(content=self._raw)
        return Reply(plain._content, plain._reasoning.rstrip())

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
                    self._reasoning += text if self._reasoning else text.lstrip()
            else:
                self._holding = True
                if kind == "region_close" and name == "tool_calls":
                    value = event["value"]
                    self._calls += value if isinstance(value, list) else [value]

    def _show(self) -> Reply:
        if self._holding or self._malformed:
            return Reply()
        # Whitespace at its end is no part of the reasoning, unless more follows.
        reasoning = self._reasoning.rstrip()
        shown = self._shown
        piece = Reply(self._content[len(shown.content) :], reasoning[len(shown.reasoning) :])
        shown.content, shown.reasoning = self._content, reasoning
        return piece


class PlainText:
    """A ReplyParser for text that is no message."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Reply:
        self._text += text
        return Reply(content=text)

    def finish(self) -> Reply:
        return Reply(content=self._text)

    def remainder(self, whole: Reply) -> Reply:
        return Reply()


Parser: TypeAlias = ReplyParser | PlainText


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
