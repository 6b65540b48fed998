"""Define a parsed reply and its tool calls, and read a JSON call while it is being written.

``CallReader`` finds where the arguments begin and end; the standard JSON parser checks them.
jiter's partial mode does not serve: it returns values, without their positions or spelling.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

# The usual order of keys; Llama says parameters. Small models write {'q': ...} or {q: ...}, which
# never becomes a call.
_CALL = re.compile(
    r'\s*\{(?:\s*"type"\s*:\s*"function"\s*,)?\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])'
)
_ARGUMENTS_ALONE = re.compile(r'\s*(?=\{\s*["}])')
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_ESCAPE_OR_QUOTE = re.compile(r'"|\\.?', re.DOTALL)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model spelled it
    # Tool results refer to it, and a stream needs it before the call is complete.
    id: str = field(default_factory=new_call_id, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat completions have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ParsedReply:
    """A whole reply, or a piece of one, whose calls are in ``pieces`` as chat completion chunks
    have them: the first piece of a call has its id and name."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    pieces: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class CallReader:
    """One call: ``{"name": ..., "arguments": {...}}``, or the arguments alone after a name.

    Arguments stream if they follow the name; a call of another form is known when it ends.

    Args:
        name: the name, if it stands before the JSON; None: it is in the JSON.
    """

    def __init__(self, name: str | None = None) -> None:
        self.text = ""
        self._id = new_call_id()
        self._name = name
        self._form = _CALL if name is None else _ARGUMENTS_ALONE
        self._start = -1  # of the arguments' object
        self._end: int | None = None
        self._at = 0  # the text before this has been looked at
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> None:
        self.text += text
        if self._start < 0:
            found = self._form.match(self.text)
            if found is None:
                return
            if self._form is _CALL:
                self._name = json.loads(found["name"])
            self._start = self._at = found.end()
        while self._end is None:
            found = (_ESCAPE_OR_QUOTE if self._in_string else _BRACKET_OR_QUOTE).search(
                self.text, self._at
            )
            if found is None or found[0] == "\\":  # the escaped character has not come
                self._at = len(self.text) if found is None else found.start()
                return
            self._at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] in ("{", "["):
                self._depth += 1
            elif found[0] in ("}", "]"):
                self._depth -= 1
                if not self._depth:
                    self._end = self._at

    @property
    def begun(self) -> ToolCall | None:
        """The call with its arguments so far; None before they begin."""
        if self._start < 0 or self._name is None:
            return None
        return ToolCall(self._name, self.text[self._start : self._end], self._id)

    def finish(self) -> ToolCall:
        """Return the whole call.

        Raises:
            ValueError: it is malformed. How its text was cut into pieces does not matter.
        """
        if self._form is _ARGUMENTS_ALONE:
            return tool_call(self._name, self.text, self._id)
        try:
            value = json.loads(self.text)
        except RecursionError:
            raise ValueError("a tool call nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError("a tool call is not an object")
        named = [value[key] for key in ("arguments", "parameters") if key in value]
        if len(named) > 1:  # ambiguous, and one may have been shown already
            raise ValueError("a tool call with arguments and parameters")
        arguments, call = (named or ["{}"])[0], self.begun
        if call is not None:
            if [value["name"], arguments] != [call.name, json.loads(call.arguments)]:
                raise ValueError("a tool call with two names or arguments")
            arguments = call.arguments
        return tool_call(value.get("name"), arguments, self._id)


def tool_call(name: Any, arguments: Any, call_id: str | None = None) -> ToolCall:
    """Return a checked call. Its arguments may be JSON text, whose spelling is kept.

    Raises:
        ValueError: name or arguments are malformed.
    """
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments = arguments.strip()
    # Stricter than json, which takes NaN.
    if not isinstance(orjson.loads(arguments), dict):
        raise ValueError("a tool call's arguments are not an object")
    return ToolCall(name, arguments, call_id or new_call_id())
