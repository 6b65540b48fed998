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
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl_proxy.errors import invalid
from agentrl_proxy.rendering.renderer import Message, Renderer

_MOST_REMEMBERED = 256
# Allows pretty-printed JSON, but no endless whitespace, into which small models fall.
_WHITESPACE = r"(\n[ \t]{0,32}| )?"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a request says about the form of its answer."""

    response_format: dict[str, Any] | None
    """Of type json_object or json_schema; None for text."""
    tool_choice: str
    """auto, required, or one tool's name as ``function:name``."""
    tools: list[dict[str, Any]] | None
    parallel_tool_calls: bool
    turn_opened: bool
    """Whether the prompt ends with the template's generation prompt. DeepSeek's templates write
    none after a tool's result, so no reasoning is open then."""


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: str  # json_object, json_schema or tool_choice, as in ``Call.params``
    grammar: str
    param: str  # the request's field, for errors
    not_enforced: tuple[str, ...] = ()
    """Keywords of non-strict schemas that no grammar enforces, in llguidance's words."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a template writes calls: opening, name, middle, arguments, (between, name, …) closing."""

    opening: str
    middle: str
    closing: str
    between: str | None  # None: one call at most
    key_separator: str
    item_separator: str

    def write(self, calls: list[tuple[str, str]]) -> str:
        between = self.between or ""
        return self.opening + between.join(n + self.middle + a for n, a in calls) + self.closing


class Constraints:
    """Compiles the constraints of requests to one model; each distinct one once."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: OrderedDict[bytes, Constraint] = OrderedDict()
        self._form: ToolForm | None = None
        self._probed = False

    async def of(self, output: StructuredOutput) -> Constraint | None:
        """Return what the sampler has to enforce; None: nothing.

        Raises:
            ApiError: it cannot be enforced (400).
        """
        if output.response_format is None and output.tool_choice == "auto":
            return None
        try:
            key = orjson.dumps(output)
        except TypeError:  # orjson's depth limit
            param = "response_format" if output.tool_choice == "auto" else "tools"
            raise invalid(param, f"{param}: a schema is nested too deeply") from None
        known = self._known.get(key)
        if known is None:
            # In a thread: a large schema, or the first template, takes a while.
            known = await asyncio.to_thread(self._work_out, output)
            self._known[key] = known
            if len(self._known) > _MOST_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return known

    @property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls; None if no grammar can repeat it."""
        if not self._probed:
            self._form = probe_tool_form(self._renderer)
            self._probed = True
        return self._form

    # --- inside

    def _work_out(self, request: StructuredOutput) -> Constraint:
        rules: list[str] = []
        bodies: list[str] = []
        missed: list[str] = []
        kind = param = "tool_choice"
        if request.response_format is not None and request.tool_choice == "auto":
            kind, param = request.response_format["type"], "response_format"
            rules.append(f"answer: %json {_answer_schema(request.response_format, missed)}")
            bodies.append("answer")
        if request.tools:
            rules += self._calls(request, param, missed)
            bodies.append("calls")
        reasoning, more = self._reasoning(request.turn_opened)
        rules = [f"start: {reasoning}body", f"body: {' | '.join(bodies)}", *rules, *more]
        grammar = "\n".join(rules)
        _check(grammar, param, f"{param} cannot be enforced")
        return Constraint(kind, grammar, param, tuple(missed))

    def _calls(self, request: StructuredOutput, param: str, missed: list[str]) -> list[str]:
        form = self.tool_form
        if form is None:
            raise invalid(
                param,
                f"{param} together with tools cannot be enforced: how this model's chat template "
                'writes tool calls is not known. Use tool_choice "auto" without response_format',
                code="unsupported_value",
            )
        calls: list[str] = []
        for i, tool in enumerate(request.tools or []):
            name = tool["function"]["name"]
            if request.tool_choice in ("auto", "required", f"function:{name}"):
                if not _NAME.fullmatch(name):
                    where = f"tools[{i}].function.name"
                    raise invalid(where, f"{where} must be of the letters A-Z a-z 0-9 _ . : / -")
                schema = _arguments_schema(tool["function"], i, form, missed)
                calls.append(f"{_literal(name)} middle %json {schema}")
        several = ""
        if form.between is not None and request.parallel_tool_calls:
            several = f" ({self._lark(form.between)} call)*"
        return [
            f"calls: {self._lark(form.opening)} call{several} {self._lark(form.closing)}",
            f"call: {' | '.join(calls)}",
            f"middle: {self._lark(form.middle)}",
        ]

    def _reasoning(self, turn_opened: bool) -> tuple[str, list[str]]:
        """What may precede the constrained part, and the rules it needs."""
        marks = self._renderer.reasoning_marks
        if marks is None:
            return "", []
        opened, closed = marks
        prompt = self._renderer.generation_prompt if turn_opened else ""
        if closed in prompt:
            return "", []  # the template closed it: no reasoning this time
        text = f"reasoned: REASONING {self._lark(closed)} /\\n{{0,2}}/"
        rules = [text, "REASONING: /(?s:.*)/"]
        if _token_id(self._renderer, closed) is None:  # several tokens: look for the text
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
        longest_first = sorted(added, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        if not added:
            pieces = [text]
        items = [f"<[{added[p]}]>" if p in added else _literal(p) for p in pieces if p]
        return " ".join(items) or '""'


def probe_tool_form(renderer: Renderer) -> ToolForm | None:
    """How the template writes tool calls; None if it has no form that a grammar can repeat."""
    one = _written(renderer, ["PROBEONE"])
    if one is None:
        return None
    found = re.fullmatch(
        r'(?P<opening>.*)PROBEONE(?P<middle>.*?)\{"PROBEA"(?P<key>:\s*)1(?P<item>,\s*)"PROBEB"'
        r"(?P=key)2\}(?P<closing>.*)",
        one,
        re.DOTALL,
    )
    if found is None or "PROBEID" in one:  # an id cannot be forced: it would always be the same
        return None
    arguments = f'{{"PROBEA"{found["key"]}1{found["item"]}"PROBEB"{found["key"]}2}}'
    form = ToolForm(
        found["opening"], found["middle"], found["closing"], None, found["key"], found["item"]
    )
    if not _reads_back(renderer, form, [("PROBEONE", arguments)]):
        return None
    two = _written(renderer, ["PROBEONE", "PROBETWO"])
    if two is None:
        return form
    _, _, rest = two.partition("PROBEONE" + form.middle + arguments)
    between, met, _ = rest.partition("PROBETWO")
    several = ToolForm(
        form.opening, form.middle, form.closing, between, form.key_separator, form.item_separator
    )
    calls = [("PROBEONE", arguments), ("PROBETWO", arguments)]
    return several if met and _reads_back(renderer, several, calls) else form


def _written(renderer: Renderer, names: list[str]) -> str | None:
    """The assistant's turn with a call to each name, without what opens and ends the turn."""
    parameters = {"type": "object", "properties": {"PROBEA": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": n, "description": "", "parameters": parameters}}
        for n in names
    ]
    calls = [
        {
            "type": "function",
            "id": f"PROBEID{i:02}",  # nine letters: Mistral's templates insist
            "function": {"name": name, "arguments": '{"PROBEA": 1, "PROBEB": 2}'},
        }
        for i, name in enumerate(names)
    ]
    user: Message = {"role": "user", "content": "x"}
    reply: Message = {"role": "assistant", "content": None, "tool_calls": calls}
    try:
        asked = renderer.text(renderer.normalize([user]), tools, generate=False)
        replied = renderer.text(renderer.normalize([user, reply]), tools, generate=False)
    except Exception:  # a template may raise anything; then its form is not known
        return None
    if not replied.startswith(asked):
        return None
    marks = renderer.reasoning_marks
    opened = renderer.generation_prompt
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


def _reads_back(renderer: Renderer, form: ToolForm, calls: list[tuple[str, str]]) -> bool:
    text = form.write(calls)
    marks, prompt = renderer.reasoning_marks, renderer.generation_prompt
    if marks is not None and marks[0] in prompt and marks[1] not in prompt:
        text = f"{marks[1]}\n\n{text}"  # the prompt opened the reasoning
    parser = renderer.parser(tools=True)
    # As the client's text: special tokens that carry no text are not part of it.
    parser.feed(renderer.decode(renderer.encode(text)))
    reply = parser.finish()
    read = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
    return not reply.content and read == [(name, json.loads(given)) for name, given in calls]


def _answer_schema(response_format: dict[str, Any], missed: list[str]) -> str:
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if response_format["type"] == "json_object":
        return _with_options({"type": "object"}, options)
    asked = response_format["json_schema"]
    text = _with_options(asked["schema"], _strictness(options, asked))
    missed += _check_schema(text, "response_format", "response_format.json_schema.schema")
    return text


def _arguments_schema(
    function: dict[str, Any], index: int, form: ToolForm, missed: list[str]
) -> str:
    schema = function.get("parameters")
    if not schema:  # no parameters: no arguments
        schema = {"properties": {}, "additionalProperties": False}
    where = f"tools[{index}].function.parameters"
    if schema.get("type", "object") != "object":
        raise invalid(where, f'{where}.type must be "object"; got {schema["type"]!r}')
    options: dict[str, Any] = {
        "whitespace_flexible": False,
        "key_separator": form.key_separator,
        "item_separator": form.item_separator,
    }
    text = _with_options({"type": "object", **schema}, _strictness(options, function))
    missed += _check_schema(text, where, where)
    return text


def _strictness(options: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Strict: what cannot be enforced is refused. Else the keywords that can be are enforced, and
    the others are noted with the call."""
    strict = bool(asked.get("strict"))
    return {**options, "coerce_one_of": True, "lenient": not strict}


def _with_options(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _check_schema(schema: str, param: str, what: str) -> list[str]:
    """What of it is not enforced."""
    from llguidance import LLMatcher

    warnings = _check(LLMatcher.grammar_from_json_schema(schema), param, what)
    return [f"{what}: {warning}" for warning in warnings]


def _check(grammar: str, param: str, what: str) -> list[str]:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        why = messages[0] if messages else "invalid"
        raise invalid(param, f"{what}: {why}", code="invalid_json_schema")
    return messages


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token_id(renderer: Renderer, text: str) -> int | None:
    """The added token that a text is, if it is one."""
    for token_id, token in renderer.tokenizer.added_tokens_decoder.items():
        if token.content == text:
            return token_id
    return None
