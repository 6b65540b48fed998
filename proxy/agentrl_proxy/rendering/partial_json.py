"""Read a JSON tool call while it is being written, so that its arguments can stream.

Finds where the arguments begin and end; the standard JSON parser checks them. jiter's partial mode
does not serve here: it returns values, without the positions or spelling of the arguments.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

_ARGUMENTS = frozenset({"arguments", "parameters"})  # Llama says parameters


class CallReader:
    """One call: ``{"name": ..., "arguments": {...}}``, or the arguments alone after a name.

    ``feed`` and ``finish`` raise ValueError for a malformed call. The pieces decide how early
    ``feed`` raises, but not the outcome of ``finish``.

    Args:
        name: the name, if it stands before the JSON; None: it is in the JSON.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self._bare = name is not None  # the JSON is the arguments alone
        self.text = ""
        self._depth = 0
        self._string_at = -1  # where the current string began
        self._escaped = False
        self._key: str | None = None  # the current key of the call's object
        self._seen = set[str]()
        self._start = -1  # of the arguments' object
        self._end = -1

    def feed(self, text: str) -> None:
        begin = len(self.text)
        self.text += text
        for at in range(begin, len(self.text)):
            self._step(at, self.text[at])

    @property
    def arguments(self) -> str:
        """The arguments' text so far, once it looks like JSON."""
        if self._start < 0:
            return ""
        end = len(self.text) if self._end < 0 else self._end
        text = self.text[self._start : end]
        # Small models write {'q': ...} or {q: ...}, which never becomes a call.
        return text if text[1:].lstrip()[:1] in ('"', "}") and len(text) > 1 else ""

    def finish(self) -> tuple[str, str]:
        """Return name and arguments, checked."""
        if self._bare:
            assert self.name is not None
            return _checked(self.name, self.text.strip())
        try:
            value = json.loads(self.text)
        except RecursionError:
            raise ValueError("a tool call nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError("a tool call is not an object")
        if self._start >= 0:
            return _checked(value.get("name"), self.text[self._start : self._end])
        arguments = next((value[k] for k in ("arguments", "parameters") if k in value), "{}")
        if not isinstance(arguments, str):  # some models quote their JSON
            raise ValueError("a tool call's arguments are not an object")
        return _checked(value.get("name"), arguments.strip())

    def _step(self, at: int, char: str) -> None:
        if self._string_at >= 0:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._end_of_string(at)
            return
        if char in " \t\r\n":
            return
        if self._depth == 0 and (char != "{" or self.text[:at].strip()):
            raise ValueError("a tool call is not one object")
        if char == '"':
            self._string_at = at
        elif char in "{[":
            self._depth += 1
            if self._start < 0 and char == "{" and self._opens_arguments():
                self._start = at
        elif char in "}]":
            self._depth -= 1
            if self._start >= 0 and self._end < 0 and self._depth == (0 if self._bare else 1):
                self._end = at + 1
        elif char == "," and self._depth == 1:
            self._key = None

    def _opens_arguments(self) -> bool:
        if self._bare:
            return self._depth == 1
        return self._depth == 2 and self._key in _ARGUMENTS

    def _end_of_string(self, at: int) -> None:
        begin, self._string_at = self._string_at, -1
        if self._bare or self._depth != 1:
            return
        text = json.loads(self.text[begin : at + 1])
        if self._key is None:
            self._key = kind = "arguments" if text in _ARGUMENTS else text
            if kind in self._seen:  # ambiguous, and one may have been shown already
                raise ValueError(f"a tool call with two of {text!r}")
            self._seen.add(kind)
        elif self._key == "name" and self.name is None:
            self.name = text


def _checked(name: Any, arguments: str) -> tuple[str, str]:
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    value = orjson.loads(arguments)  # stricter than json, which takes NaN
    if not isinstance(value, dict):
        raise ValueError("a tool call's arguments are not an object")
    return name, arguments
