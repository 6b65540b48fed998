"""Define field types of request bodies: each checks a JSON value and has its JSON Schema.

Knows JSON. The fields of each protocol stand in that protocol's module.

``null`` always means that an optional field is not set. Unknown fields are ignored, because
frameworks send many. A field type accepts what ``check`` accepts; a test generates requests from
the schemas and compares. With ``ours=False`` a provider answers the request: then only lengths of
lists and the JSON types that LiteLLM relies on are checked, and ranges are left to the provider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, TypeAlias

import orjson

from agentrl_proxy.errors import ApiError, invalid

Schema = dict[str, Any]
Field: TypeAlias = "Value | Array | Object | Tagged | Either"
"""Checks one JSON value (``check`` raises WrongValue), and describes it as ``schema``."""

LARGEST_INTEGER = 2**64 - 1  # orjson reads larger ones as floats
LARGEST_COUNT = 2**31 - 1  # samplers put numbers of tokens into tensors
MAX_DEPTH = 254  # orjson's limit; the chat template and the store take this much
MAX_MARKS = 300_000
"""Of ``,`` and, three times as dear, ``: [ {`` in a body, those in its texts included. Parsing
takes 0.1 us for each, and nothing else runs meanwhile."""
_DEAR = 3


@dataclass
class WrongValue(Exception):
    """A value that its field type refuses. ``path`` leads from the value up to the body."""

    value: Any
    allowed: str
    path: list[str] = field(default_factory=list[str])
    code: str = "invalid_value"


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a predicate decides, with ``allowed`` as the words of its error."""

    accepts: Callable[[Any], bool]
    allowed: str
    schema: Schema
    for_provider: Value | None = None  # replaces it where a provider answers

    def check(self, value: Any, ours: bool) -> None:
        one = self if ours or self.for_provider is None else self.for_provider
        if not one.accepts(value):
            raise WrongValue(value, one.allowed)


class Array:
    """A list of one field type."""

    def __init__(
        self, items: Field, *, minimum: int = 0, maximum: int | None = None, **more: Any
    ) -> None:
        self._items, self._minimum = items, minimum
        self._maximum = math.inf if maximum is None else maximum
        length = "" if maximum is None else f" of up to {maximum}"
        self._allowed = f"a {'non-empty ' if minimum else ''}list{length}"
        limits = {"minItems": minimum or None, "maxItems": maximum}
        self.schema: Schema = {"type": "array", "items": items.schema, **more}
        self.schema |= {name: limit for name, limit in limits.items() if limit is not None}

    def check(self, value: Any, ours: bool) -> None:
        if not isinstance(value, list) or not self._minimum <= len(value) <= self._maximum:
            raise WrongValue(value, self._allowed)
        i = 0
        try:
            for i, item in enumerate(value):  # noqa: B007  (names the item that is wrong)
                self._items.check(item, ours)
        except WrongValue as wrong:
            wrong.path.append(f"[{i}]")
            raise


class Object:
    """An object with the fields of ``properties``; those in ``required`` must not be null."""

    def __init__(self, required: list[str], /, **properties: Field) -> None:
        self.required, self.properties = required, properties
        self._fields = [(name, one.check, name in required) for name, one in properties.items()]
        self.schema: Schema = {
            "type": "object",
            "required": required,
            "properties": {
                name: one.schema if name in required else {"anyOf": [one.schema, {"type": "null"}]}
                for name, one in properties.items()
            },
        }

    def check(self, value: Any, ours: bool) -> None:
        if not isinstance(value, dict):
            raise WrongValue(value, "an object")
        name = ""
        try:
            for name, check, required in self._fields:
                one = value.get(name)
                if one is not None or required:
                    check(one, ours)
        except WrongValue as wrong:
            wrong.path.append("." + name)
            raise


class Tagged:
    """An object whose field ``tag`` says which of ``kinds`` it is.

    Args:
        default: the tag of an object that has none.
        provider_kinds: kinds that only providers take; they take unknown kinds, too.
        refusal: code and words for kinds that are known but unsupported; without
            ``provider_kinds`` every unknown kind is such.
    """

    def __init__(
        self,
        kinds: Mapping[str, Object],
        *,
        tag: str = "type",
        default: str | None = None,
        provider_kinds: Mapping[str, Object] | None = None,
        refusal: tuple[str, str] | None = None,
    ) -> None:
        self._tag, self._kinds, self._default = tag, kinds, default
        self._provider_kinds, self._refusal = provider_kinds, refusal
        self.schema: Schema = {
            "anyOf": [self._schema(one) for one in dict.fromkeys(kinds.values())]
        }

    def _schema(self, kind: Object) -> Schema:
        names = [name for name, one in self._kinds.items() if one is kind]
        required = kind.required if self._default in names else [self._tag, *kind.required]
        return {
            **kind.schema,
            "required": required,
            "properties": {self._tag: {"enum": names}, **kind.schema["properties"]},
        }

    def check(self, value: Any, ours: bool) -> None:
        if not isinstance(value, dict):
            raise WrongValue(value, f"an object with a {self._tag}")
        name = value.get(self._tag)
        if name is None:
            name = self._default
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is not None:
            kind.check(value, ours)
            return
        special = self._provider_kinds
        if isinstance(name, str) and special is not None and not ours:
            if name in special:
                special[name].check(value, ours)
            return
        known = isinstance(name, str) and (special is None or name in special)
        if self._refusal is not None and known:
            code, words = self._refusal
            raise WrongValue(value, f"is of type {name}; {words}", [], code)
        raise WrongValue(name, f"one of {', '.join(self._kinds)}", ["." + self._tag])


class Either:
    """One of several field types, told apart by the value's JSON type."""

    def __init__(self, allowed: str, **fields: Field) -> None:
        """``fields``: by the Python type of JSON's string (``str``), ``list`` or ``dict``."""
        self._allowed, self._fields = allowed, fields
        self.schema: Schema = {"anyOf": [one.schema for one in fields.values()]}

    def check(self, value: Any, ours: bool) -> None:
        one = self._fields.get(type(value).__name__)
        if one is None:
            raise WrongValue(value, self._allowed)
        one.check(value, ours)


def check_body(body: Field, raw: Any, *, ours: bool = True) -> None:
    """Check a request body.

    Args:
        ours: whether our own model answers; else a provider's.

    Raises:
        ApiError: a field is wrong (400); it names the field and what is allowed.
    """
    try:
        body.check(raw, ours)
    except WrongValue as wrong:
        param = "".join(reversed(wrong.path)).removeprefix(".") or None
        words = wrong.allowed
        if wrong.code == "invalid_value":
            words = f"must be {words}; got {shown(wrong.value)}"
        raise invalid(param, f"{param or 'the body'} {words}", code=wrong.code) from None


_SHORT = Repr()  # looks at the beginning of a value only
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_marks(body: bytes) -> int:
    """Return how many lists and objects a JSON body may have, by its characters.

    Raises:
        ApiError: parsing it would take too long (413).
    """
    opened = body.count(b"[") + body.count(b"{")
    dear = MAX_MARKS // _DEAR
    if len(body) > dear and _DEAR * (opened + body.count(b":")) + body.count(b",") > MAX_MARKS:
        message = (
            f"the body has too many values: more than {MAX_MARKS} of the character , or {dear} of "
            "the characters : [ {"
        )
        raise ApiError(413, message, code="body_too_large")
    return opened


def read_object(body: bytes, where: str = "the body") -> dict[str, Any]:
    """Parse a body, or a field with JSON text, that must be a JSON object.

    Raises:
        ApiError: it is no JSON object, or nested too deeply (400), or has too many values (413).
    """
    opened = check_marks(body)
    param = None if where == "the body" else where
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(param, f"{where} is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid(param, f"{where} must be a JSON object; got {shown(raw)}")
    if opened > MAX_DEPTH:  # it may be nested too deeply
        try:
            orjson.dumps(raw)  # the cheapest walk; refuses what is deeper than MAX_DEPTH
        except TypeError:
            message = f"{where} is nested more than {MAX_DEPTH} levels deep"
            raise invalid(param, message, code="invalid_json") from None
    return raw


# --- common field types


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def integer(minimum: int, maximum: int = LARGEST_COUNT) -> Value:
    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return Value(
        lambda v: is_integer(v) and minimum <= v <= maximum,
        f"an integer from {minimum} to {maximum}",
        schema,
        INTEGER,
    )


def one_of(*names: str) -> Value:
    return Value(lambda v: v in names, f"one of {', '.join(names)}", {"enum": [*names]})


def text_or(items: Field, *, minimum: int = 0) -> Either:
    """A string or a list; ``minimum`` is the length of both."""
    parts = Array(items, minimum=minimum)
    return Either("a string or a list of parts", str=NONEMPTY if minimum else TEXT, list=parts)


ANYTHING = Value(lambda _: True, "anything", {})
BOOLEAN = Value(lambda v: isinstance(v, bool), "true or false", {"type": "boolean"})
TEXT = Value(lambda v: isinstance(v, str), "a string", {"type": "string"})
NONEMPTY = Value(
    lambda v: isinstance(v, str) and v != "",
    "a non-empty string",
    {"type": "string", "minLength": 1},
)
NAME = Value(  # PostgreSQL takes no NUL
    lambda v: isinstance(v, str) and v != "" and "\0" not in v,
    "a non-empty string without NUL characters",
    {"type": "string", "minLength": 1, "pattern": "^[^\\x00]*$"},
)
STRING_OR_OBJECT = Value(lambda v: isinstance(v, str | dict), "a string or an object", {})
OBJECT = Value(lambda v: isinstance(v, dict), "an object", {"type": "object"})
INTEGER = Value(
    is_integer, "an integer", {"type": "integer", "minimum": -(2**63), "maximum": LARGEST_INTEGER}
)
NUMBER = Value(is_number, "a number", {"type": "number"})
JSON_SCHEMA = Value(lambda v: isinstance(v, dict), "an object, the JSON schema", {"type": "object"})
