"""Define a parsed reply and its tool calls, and read calls in JSON, whose spelling is kept, and in
Python."""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

# The usual order of keys; Llama says parameters.
_CALL = re.compile(
    r'\s*\{(?:\s*"type"\s*:\s*"function"\s*,)?\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])'
)
_DECODER = json.JSONDecoder()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model spelled it
    # Tool results refer to it.
    id: str = field(default_factory=new_call_id, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat completions have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ParsedReply:
    """A whole reply, or a piece of one."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    first_call: int = 0  # of a piece: the index of its first call in the reply


def read_call(text: str, name: str | None, *, delimited: bool) -> ToolCall:
    """Return the call ``{"name": ..., "arguments": {...}}``, or the arguments alone after a name.

    Args:
        name: the name, if it stands before the JSON; None: it is in the JSON.
        delimited: whether the text stood between delimiters; else only its arguments tell a call
            from an answer in JSON.

    Raises:
        ValueError: it is malformed.
    """
    if name is not None:
        return tool_call(name, text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("a tool call nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("a tool call is not an object")
    named = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(named) > 1:
        raise ValueError("a tool call with arguments and parameters")
    if not (named or delimited):
        raise ValueError("an object without arguments")
    arguments = (named or ["{}"])[0]
    if (begun := _CALL.match(text)) is not None:
        spelled, end = _DECODER.raw_decode(text, begun.end())
        if [value["name"], arguments] != [json.loads(begun["name"]), spelled]:
            raise ValueError("a tool call with two names or arguments")
        arguments = text[begun.end() : end]
    return tool_call(value.get("name"), arguments)


def json_of_gemmas(text: str) -> str:
    """Return Gemma 4's arguments as JSON: its keys have no quotes, and its strings marks of their
    own."""

    def quoted(found: re.Match[str]) -> str:
        return json.dumps(found["text"] if found["key"] is None else found["key"])

    return _OF_GEMMA.sub(quoted, text)


_OF_GEMMA = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?<![^\s{,])(?P<key>[^\s{}\[\],:"<]++)(?=\s*:)', re.DOTALL
)


def read_python_calls(text: str) -> list[ToolCall]:
    """Return the calls of a list as Python writes it: ``[search(q='x', n=3), stop()]``.

    Names need not be Python's, as ``get-weather`` and ``from``, and strings may go over lines.

    Raises:
        ValueError: it is malformed.
    """
    names: list[str] = []

    def stand_in(found: re.Match[str]) -> str:
        if found["name"] is None:
            return _LINE_END.sub(lambda end: repr(end[0])[1:-1], found[0])
        names.append(found["name"])
        return f"n{len(names) - 1}"

    def name_of(given: Any) -> str:
        return names[int(given[1:])]

    try:
        listed: Any = ast.parse(_NAME_OR_STRING.sub(stand_in, text.strip()), mode="eval")
        calls: list[ToolCall] = []
        for call in _Constants().visit(listed).body.elts:
            given = {name_of(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            if call.args or len(given) < len(call.keywords):
                raise ValueError("a tool call's arguments need a name of their own each")
            calls.append(tool_call(name_of(call.func.id), given))
    except (
        AttributeError, IndexError, TypeError, SyntaxError, RecursionError, MemoryError
    ) as error:  # fmt: skip
        raise ValueError(f"no list of calls: {error}") from None
    return calls


# Up to the end of the text where the quote is not closed: else each quote is tried to that end.
_NAME_OR_STRING = re.compile(
    r"'(?:[^'\\]|\\.)*(?:'|\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\Z)"
    r"|(?<![^\s,(\[])(?P<name>[^\s,()\[\]{}=:'\"]++)(?=\s*[(=])",
    re.DOTALL,
)
_LINE_END = re.compile(r"\\?\r?\n|\r")


class _Constants(ast.NodeTransformer):
    """Reads JSON's constants, in which some templates write nested values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        named = {"true": True, "false": False, "null": None}
        return ast.Constant(named[node.id]) if node.id in named else node


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """Return a checked call. Its arguments may be JSON text, whose spelling is kept.

    Raises:
        ValueError: name or arguments are malformed.
    """
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    name.encode()  # no lone surrogate
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments = arguments.strip()
    # Stricter than json, which takes NaN.
    if not isinstance(orjson.loads(arguments), dict):
        raise ValueError("a tool call's arguments are not an object")
    return ToolCall(name, arguments)
