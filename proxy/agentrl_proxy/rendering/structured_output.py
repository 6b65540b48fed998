"""Compile ``response_format`` and ``tool_choice`` into a grammar for the sampler.

Grammars are llguidance's Lark. The sampler enforces them.

The form of a tool call is read off the chat template: it renders a dummy call, the grammar repeats
what it wrote around name and arguments, and the reply parser must read it back. A template that
fails this gets a 400; a constraint is never dropped silently. Where the template knows reasoning,
the grammar allows one reasoning block before the constrained part, and demands its end where the
template opened it.

Constrained calls in training: their tokens are drawn from the policy π with forbidden tokens masked
out and the rest renormalized, while the recorded log-probs are the raw policy's, which the trainer
recomputes. With μ the sampled distribution and Z the raw probability of the allowed tokens,
log μ = log π - log Z for every token at temperature 1. The trainer's importance ratio
π_now / π_then measures how far the policy moved, and misses the factor π_then / μ = Z ≤ 1. So
forced tokens (Z near 0) train as if the policy had chosen them, which teaches the form and is
biased where Z is far from 1. Two params of a call let training weight or drop it: ``constrained``
(what was enforced) and ``constrained_log_mass`` (Σ log Z over the answer; 0: the grammar changed
nothing).
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import orjson

from agentrl_proxy.errors import invalid
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply, ToolCall

# Allows pretty-printed JSON, but no endless whitespace, into which small models fall.
_WHITESPACE = r"(\n[ \t]{0,32}| )?"
_VALUES = ("enum", "const", "default", "examples")
"""Keywords of JSON Schema whose values are no schemas."""
_NAMED = ("properties", "$defs", "definitions")
"""Those whose values are schemas by name."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class ConstrainedRequest(Protocol):
    """What a request may demand of its answer's form: protocols.chat.ChatRequest says more."""

    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def response_format(self) -> dict[str, Any] | None: ...
    @property
    def tool_choice(self) -> str: ...
    @property
    def parallel_tool_calls(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: str  # json_object, json_schema or tool_choice, as in ``Call.params``
    grammar: str
    param: str  # the request's field, for errors
    not_enforced: tuple[str, ...] = ()
    """Keywords of non-strict schemas that no grammar enforces, in llguidance's words."""


class Constraints:
    """Compiles the constraints of requests to one model; each distinct one once."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[bytes, Constraint] = {}

    async def of(
        self, request: ConstrainedRequest, *, opening: str | None = None
    ) -> Constraint | None:
        """Return what the sampler has to enforce; None: nothing.

        Args:
            opening: what ``Renderer.opening`` says of the prompt. Default: the template's
                generation prompt.

        Raises:
            ApiError: it cannot be enforced (400).
        """
        format, choice = request.response_format, request.tool_choice
        opening = self._renderer.generation_prompt if opening is None else opening
        if format is None and choice == "auto":
            return None
        try:
            key = orjson.dumps(
                [format, choice, request.tools, request.parallel_tool_calls, opening]
            )
        except TypeError:  # orjson's depth limit
            param = "response_format" if choice == "auto" else "tools"
            raise invalid(param, f"{param}: a schema is nested too deeply") from None
        known = self._known.get(key)
        if known is None:
            # In a thread: a large schema, or the first template, takes a while.
            if len(self._known) >= 256:
                self._known.clear()
            known = self._known[key] = await asyncio.to_thread(self._compile, request, opening)
        return known

    @cached_property
    def _form(self) -> ToolForm | None:
        """How the model writes tool calls; None if no grammar can repeat it."""
        return probe_tool_form(self._renderer)

    def _compile(self, request: ConstrainedRequest, opening: str) -> Constraint:
        rules, bodies, missed = list[str](), list[str](), list[str]()
        kind = param = "tool_choice"
        format = request.response_format
        if format is not None and request.tool_choice == "auto":
            kind, param = format["type"], "response_format"
            asked: dict[str, Any] = {"schema": {"type": "object"}}
            asked |= format["json_schema"] if kind == "json_schema" else {}
            options = {"whitespace_pattern": _WHITESPACE, "lenient": not asked.get("strict")}
            where = "response_format.json_schema.schema"
            rules.append(f"answer: {_json(asked['schema'], options, param, where, missed)}")
            bodies.append(f"{self._before_answer()} answer")
        if request.tools:
            rules += self._calls(request, param, missed)
            bodies.append("calls")
        reasoning, more = self._reasoning(opening)
        begin = [f"start: {reasoning}body", f"body: {' | '.join(bodies)}"]
        grammar = "\n".join([*begin, *rules, *more])
        _check(grammar, param, f"{param} cannot be enforced")
        return Constraint(kind, grammar, param, tuple(missed))

    def _calls(self, request: ConstrainedRequest, param: str, missed: list[str]) -> list[str]:
        form = self._form
        if form is None:
            raise invalid(
                param,
                f"{param} together with tools cannot be enforced: how this model's chat template "
                'writes tool calls is not known. Use tool_choice "auto" without response_format',
                code="unsupported_value",
            )
        calls: list[str] = []
        for i, tool in enumerate(request.tools or []):
            function = tool["function"]
            name, where = function["name"], f"tools[{i}].function"
            if request.tool_choice not in ("auto", "required", f"function:{name}"):
                continue
            if not _NAME.fullmatch(name):
                where += ".name"
                raise invalid(where, f"{where} must be of the letters A-Z a-z 0-9 _ . : / -")
            # No parameters: no arguments.
            schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
            schema = {"type": "object", **schema}
            where += ".parameters"
            if schema["type"] != "object":
                raise invalid(where, f'{where}.type must be "object"; got {schema["type"]!r}')
            strict = bool(function.get("strict"))
            options = {"whitespace_flexible": False, **form.separators, "lenient": not strict}
            arguments = _json(schema, options, where, where, missed)
            calls.append(f"{_literal(name)} middle {arguments}")
        several = ""
        if form.between is not None and request.parallel_tool_calls:
            several = f" ({self._lark(form.between)} call)*"
        return [
            f"calls: {self._lark(form.opening)} call{several} {self._lark(form.closing)}",
            f"call: {' | '.join(calls)}",
            f"middle: {self._lark(form.middle)}",
        ]

    def _before_answer(self) -> str:
        """What the template writes before an answer, as gpt-oss's channel; not an empty thought."""
        marks, before = self._renderer.reasoning_marks, self._renderer.before_content
        return self._lark("" if marks is not None and marks[1] in before else before)

    def _reasoning(self, prompt: str) -> tuple[str, list[str]]:
        """What may precede the constrained part, and the rules it needs."""
        marks = self._renderer.reasoning_marks
        if marks is None:
            return "", []
        opened, closed = marks
        if closed in prompt:
            return "", []  # the template closed it: no reasoning this time
        added = self._renderer.tokenizer.added_tokens_decoder.values()
        if any(closed.startswith(token.content) for token in added):
            text = f"reasoned: REASONING {self._lark(closed)} /\\n{{0,2}}/"
            rules = [text, "REASONING: /(?s:.*)/"]
        else:  # several tokens: look for the text
            rules = [
                "reasoned: reasoning /\\n{0,2}/",
                f"reasoning[suffix={_literal(closed)}]: /(?s:.*)/",
            ]
        if opened in prompt:
            return "reasoned ", rules
        if opened not in (self._renderer.tokenizer.get_chat_template() or ""):
            return "", []  # the parser would read it, but this model does not reason
        return f"({self._lark(opened)} reasoned)? ", rules

    def _lark(self, text: str) -> str:
        """A text as Lark: what the tokenizer has an added token for must be that token."""
        added = {t.content: i for i, t in self._renderer.tokenizer.added_tokens_decoder.items()}
        longest_first = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        pieces = re.split(f"({longest_first})", text) if added else [text]
        items = [f"<[{added[p]}]>" if p in added else _literal(p) for p in pieces if p]
        return " ".join(items) or '""'


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a template writes calls: opening, name, middle, arguments, (between, name, …) closing."""

    opening: str
    middle: str
    closing: str
    between: str | None  # None: one call at most
    separators: dict[str, str]  # llguidance's options: what stands between keys and items

    def reads_back(self, renderer: Renderer, names: list[str], arguments: str) -> bool:
        """Whether the reply parser finds these calls in what the form writes."""
        written = [name + self.middle + arguments for name in names]
        text = self.opening + (self.between or "").join(written) + self.closing
        reply = _parsed(renderer, text)
        read = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        return not reply.content and read == [(name, json.loads(arguments)) for name in names]


def probe_tool_form(renderer: Renderer) -> ToolForm | None:
    """How the template writes tool calls; None if it has no form that a grammar can repeat."""
    one = _written(renderer, ["PROBEONE"])
    found = re.fullmatch(
        r'(?P<opening>.*)PROBEONE(?P<middle>.*?)(?P<arguments>\{"PROBEA"(?P<key>:\s*)1(?P<item>,\s*)'
        r'"PROBEB"(?P=key)2\})(?P<closing>.*)',
        one,
        re.DOTALL,
    )
    if found is None or "PROBEID" in one:  # an id cannot be forced: it would always be the same
        return None
    separators = {"key_separator": found["key"], "item_separator": found["item"]}
    middle, arguments = found["middle"], found["arguments"]
    form = ToolForm(found["opening"], middle, found["closing"], None, separators)
    if not form.reads_back(renderer, ["PROBEONE"], arguments):
        return None
    names = ["PROBEONE", "PROBETWO"]
    _, _, rest = _written(renderer, names).partition("PROBEONE" + middle + arguments)
    between, met, _ = rest.partition("PROBETWO")
    several = replace(form, between=between)
    return several if met and several.reads_back(renderer, names, arguments) else form


def reads_calls(renderer: Renderer) -> bool:
    """Whether tool calls that the template writes are found in replies; else they stay text."""
    reply = _parsed(renderer, _written(renderer, ["PROBEONE"]))
    return [call.name for call in reply.tool_calls] == ["PROBEONE"]


def _parsed(renderer: Renderer, turn: str) -> ParsedReply:
    """Parse an assistant's turn as the client's text: without special tokens that carry none."""
    marks, prompt = renderer.reasoning_marks, renderer.generation_prompt
    if marks is not None and marks[0] in prompt and marks[1] not in prompt:
        turn = f"{marks[1]}\n\n{turn}"  # the prompt opened the reasoning
    return renderer.parse(renderer.encode(turn))


def _written(renderer: Renderer, names: list[str]) -> str:
    """The assistant's turn with a call to each name, without what opens and ends the turn; "" if
    the template cannot write it."""
    tools: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        parameters = {"type": "object", "properties": {"PROBEA": {"type": "integer"}}}
        tool = {"name": name, "description": "", "parameters": parameters}
        tools.append({"type": "function", "function": tool})
        # Nine letters in an id: Mistral's templates insist.
        call = ToolCall(name, '{"PROBEA": 1, "PROBEB": 2}', id=f"PROBEID{i:02}")
        calls.append(call.as_dict())
    user = {"role": "user", "content": "x"}
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    try:
        asked = renderer.text(renderer.normalize([user]), tools, generate=False)
        replied = renderer.text(renderer.normalize([user, reply]), tools, generate=False)
    except Exception:  # a template may raise anything
        return ""
    if not replied.startswith(asked):
        return ""
    marks, opened = renderer.reasoning_marks, renderer.generation_prompt
    if marks is not None:  # reasoning that a prompt opens is none of a past turn
        opened = opened.partition(marks[0])[0]
    turn = replied.removeprefix(asked).removeprefix(opened)
    before, name, after = turn.partition(names[0])
    if marks is not None and marks[1] in before:  # an empty reasoning block is no part of the call
        before = before.rpartition(marks[1])[2].lstrip()
    ids = renderer.encode(after)
    ends = [i for i, token_id in enumerate(ids) if renderer.is_stop(token_id)]
    if ends:
        after = renderer.decode_raw(ids[: ends[0]])
    return before + name + after


def _json(
    schema: dict[str, Any], options: dict[str, Any], param: str, where: str, missed: list[str]
) -> str:
    """Return a schema as llguidance reads it.

    Args:
        options: llguidance's. With ``lenient`` the keywords that can be enforced are, and the
            others are added to ``missed``, which is noted with the call. Else they are refused.
    """
    options = {"coerce_one_of": True, **options}
    if options.get("lenient") and _validated(_guided(schema, options))[0]:
        schema = _without_odd_patterns(schema, where, missed)
    grammar = _guided(schema, options)
    missed += [f"{where}: {warning}" for warning in _check(grammar, param, where)]
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _without_odd_patterns(value: Any, where: str, missed: list[str], *, names: bool = False) -> Any:
    """Return a schema without the patterns that llguidance cannot read, as look-around is.

    Args:
        names: the keys of ``value`` are no keywords, but names of properties or definitions.
    """
    if isinstance(value, list):
        return [_without_odd_patterns(one, where, missed) for one in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, one in value.items():
        if not names and name == "pattern" and _is_odd(one):
            missed.append(f"{where}: pattern {one!r}")
        elif not names and name in _VALUES:
            kept[name] = one
        else:
            below = not names and name in _NAMED
            kept[name] = _without_odd_patterns(one, where, missed, names=below)
    return kept


def _is_odd(pattern: Any) -> bool:
    """Whether it is a pattern that only llguidance cannot read."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError):
        return False
    return _validated(_guided({"pattern": pattern}))[0]


def _guided(schema: dict[str, Any], options: dict[str, Any] | None = None) -> str:
    from llguidance import LLMatcher

    text = json.dumps({**schema, "x-guidance": options or {}}, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text)


def _validated(grammar: str) -> tuple[bool, list[str]]:
    """Return whether llguidance refuses a grammar, and what it says of it."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar_with_warnings(grammar)


def _check(grammar: str, param: str, what: str) -> list[str]:
    failed, messages = _validated(grammar)
    if failed:
        why = messages[0] if messages else "invalid"
        raise invalid(param, f"{what}: {why}", code="invalid_json_schema")
    return messages


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
