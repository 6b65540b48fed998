"""response_format and tool_choice over the real engine, and what they cost the record."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from family_templates import FAMILIES
from official_clients import client
from pydantic import BaseModel, ConfigDict, Field
from running_gateway import running
from scripted_sampler import Running

from agentrl.samplers.embedded import EmbeddedSampler
from agentrl_proxy.errors import ApiError
from agentrl_proxy.protocols.chat import ChatRequest, chat_request
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.structured_output import Constraints, probe_tool_form
from agentrl_tracer.schemas import Call
from agentrl_trainer.inference.grammar import Grammars
from agentrl_trainer.models.loading import load_base

ASKED: list[Any] = [{"role": "user", "content": "Is it bigger than a house?"}]


class Verdict(BaseModel):
    """20 Questions' answerer."""

    model_config = ConfigDict(extra="forbid")
    brief_reason: str = Field(max_length=40)
    yes_or_no: Literal["yes", "no", "n/a"]
    correct: bool


PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich", "東京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "give_up"}},
]


class Live:
    """A gateway over the tiny model, and OpenAI's client of one rollout."""

    def __init__(self, gateway: Running, base: Any) -> None:
        self.gateway, self.base, self.api = gateway, base, client(gateway)

    @property
    def calls(self) -> list[Call]:
        return self.gateway.calls(self.gateway.claims[0])

    def ask(self, **body: Any) -> Any:
        return self.api.chat.completions.create(**{"model": "m", "messages": ASKED} | body)

    def speaker(self, template: str) -> Renderer:
        """The tiny model's renderer with another chat template."""
        tokenizer = copy.deepcopy(self.base.tokenizer)
        tokenizer.chat_template = template
        return Renderer(tokenizer)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    base = load_base("agentrl-tiny", device="cpu", dtype="float32")
    sampler = EmbeddedSampler(base)
    sampler.start()
    try:
        with running(
            tmp_path_factory.mktemp("store"), Renderer(base.tokenizer), {}, sampler=sampler,
            models={}, default_adapter=None, context_length=base.context_length,
            defaults={"max_tokens": 600},
        ) as gateway:  # fmt: skip
            made = Live(gateway, base)
            with made.api:
                yield made
    finally:
        sampler.stop()


def raw_logprobs(live: Live, call: Call) -> list[float]:
    """What the unmasked model gives the sampled tokens, in a forward of its own."""
    model = load_base("agentrl-tiny", device="cpu", dtype="float32").model
    ids = torch.tensor([call.prompt_ids + call.response_ids])
    with torch.inference_mode():
        logprobs = model(ids).logits[0].log_softmax(-1)
    at = len(call.prompt_ids) - 1
    return [logprobs[at + i, t].item() for i, t in enumerate(call.response_ids)]


def test_parse_gives_objects_and_the_record_keeps_raw_logprobs(live: Live) -> None:
    before = len(live.calls)
    for seed in range(8):
        answer = live.api.chat.completions.parse(
            model="m", messages=ASKED, response_format=Verdict, seed=seed
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(choice.message.parsed, Verdict)
    calls = live.calls[before:]
    assert len(calls) == 8
    assert sum(call.finish_reason == "stop" for call in calls) >= 6
    for call in calls:
        assert call.params["constrained"] == "json_schema"
        assert call.params["constrained_log_mass"] < -1
    found, expected = calls[0].response_logprobs, raw_logprobs(live, calls[0])
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert live.gateway.stats["constrained"] >= 8


@pytest.mark.parametrize("stream", [False, True])
def test_json_object_and_n(live: Live, stream: bool) -> None:
    # Left to itself the tiny model would ramble on inside a string until the limit.
    ends = {i: 9 for t in ('"', '"}', "}") for i in live.base.tokenizer.encode(t)}
    body: dict[str, Any] = {"response_format": {"type": "json_object"}, "n": 4, "seed": 4}
    body |= {"max_tokens": 200, "logit_bias": ends}
    texts, reasons = [""] * 4, [""] * 4
    made = live.ask(stream=stream, **body)
    for answer in made if stream else [made]:
        for choice in answer.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
            reasons[choice.index] = choice.finish_reason or ""
    assert len(set(texts)) > 1
    for text, reason in zip(texts, reasons, strict=True):
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert text.lstrip()[:1] in ("{", "")
    assert "stop" in reasons


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_required(live: Live, stream: bool) -> None:
    names = set[str]()
    for seed in range(12):
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": seed}
        if stream:
            with live.api.chat.completions.stream(model="m", messages=ASKED, **body) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = live.ask(**body).choices[0]
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            names.add(call.function.name)
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                jsonschema.validate(arguments, PLACE)
            else:
                assert (call.function.name, arguments) == ("give_up", {})
    assert "get_weather" in names
    assert live.calls[-1].params["constrained"] == "tool_choice"


def test_a_named_tool_once(live: Live) -> None:
    for name in ("give_up", "get_weather"):
        choice = {"type": "function", "function": {"name": name}}
        answer = live.ask(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=6)
        done = [c for c in answer.choices if c.finish_reason != "length"]
        assert done
        for choice in done:
            assert choice.message.tool_calls
            [call] = choice.message.tool_calls
            assert call.type == "function"
            assert call.function.name == name


def test_a_forced_call_continues_as_a_conversation(live: Live) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked = live.ask(tools=TOOLS, seed=1, parallel_tool_calls=False, tool_choice=choice)
    message = asked.choices[0].message
    assert message.tool_calls
    more = [
        *ASKED,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    live.ask(messages=more, tools=TOOLS, max_tokens=5)
    first, second = live.calls[-2:]
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known
    assert second.params["continued"]
    assert "constrained" not in second.params


def test_a_format_beside_tools_allows_either(live: Live) -> None:
    format = _format(Verdict.model_json_schema(), strict=True)
    answer = live.ask(tools=TOOLS, n=24, seed=3, response_format=format)
    for choice in answer.choices:
        if choice.finish_reason == "tool_calls":
            assert choice.message.tool_calls
        elif choice.finish_reason == "stop":
            Verdict.model_validate_json(choice.message.content or "")


def _format(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def _deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _tool(parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": _format({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": _format({"not": {}}, strict=True)}, "response_format", "not"),
        ({"response_format": _format({"$ref": "#/$defs/no"})}, "response_format", "/$defs/no"),
        ({"response_format": _format({"type": "string", "pattern": "("})}, "response_format", "("),
        ({"response_format": _format(_deep(400))}, None, "deep"),
        ({"response_format": _format([])}, "response_format.json_schema.schema", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        (
            {"tools": [TOOLS[0], _tool({"type": "object", "properties": {"a": {"type": "x"}}})],
             "tool_choice": "required"},
            "tools[1].function.parameters", "x",
        ),
        ({"tools": [_tool({"type": "array"})], "tool_choice": "required"},
         "tools[0].function.parameters", "object"),
        ({"tools": [_tool("no")]}, "tools[0].function.parameters", "object"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
         "tool_choice", "nope"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "custom"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "token ids"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    live: Live, body: dict[str, Any], param: str | None, says: str
) -> None:
    before = len(live.calls)
    with pytest.raises(openai.BadRequestError) as refused:
        live.ask(**body)
    assert refused.value.param == param
    assert says in refused.value.message
    assert len(live.calls) == before


def test_not_strict_keeps_what_can_be_enforced(live: Live) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    answer = live.ask(response_format=_format(schema), seed=1)
    assert set(json.loads(answer.choices[0].message.content)) <= {1, 2}
    [missed] = live.calls[-1].params["not_enforced"]
    assert missed.startswith("response_format.json_schema.schema: ")
    assert "uniqueItems" in missed
    del schema["uniqueItems"]
    live.ask(response_format=_format(schema), seed=1)
    assert "not_enforced" not in live.calls[-1].params
    tool = copy.deepcopy(TOOLS[0])
    tool["function"]["parameters"]["properties"]["q"] = {"type": "string", "format": "color"}
    live.ask(tools=[tool], tool_choice="required", max_tokens=4)
    assert live.calls[-1].params["not_enforced"] == [
        "tools[0].function.parameters: Unknown format: color"
    ]


def test_patterns_that_no_grammar_enforces_are_left_out(live: Live) -> None:
    """Pydantic's for a ``Decimal``, and Zod's for an e-mail address, look ahead."""
    money = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*$"}]}
    fields = {"default": money, "pattern": {"type": "string", "pattern": "^[ab]{2}$"}}
    schema = {"type": "object", "properties": fields, "required": ["pattern"]}
    tool = {"type": "function", "function": {"name": "pay", "parameters": schema}}
    answer = live.ask(tools=[tool], tool_choice="required", seed=1)
    missed = r"tools[0].function.parameters: pattern '^(?!^[-+.]*$)\\d*$'"
    assert live.calls[-1].params["not_enforced"] == [missed]
    [call] = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)["pattern"]) <= {"a", "b"}
    with pytest.raises(openai.BadRequestError, match="regex parse error"):
        live.ask(response_format=_format(schema, strict=True))


def test_tool_choice_none_does_not_show_tools(live: Live) -> None:
    live.ask(tools=TOOLS, tool_choice="none", max_tokens=4)
    live.ask(max_tokens=4)
    first, second = live.calls[-2:]
    assert first.prompt_ids == second.prompt_ids


def asking(**body: Any) -> ChatRequest:
    return chat_request({"model": "m", "messages": ASKED, **body})


LLAMA = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}
{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}
{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def test_an_unknown_tool_form_is_refused(live: Live) -> None:
    """The template writes calls that the reply parser would not read back."""
    renderer = live.speaker(LLAMA)
    assert probe_tool_form(renderer) is None
    constraints = Constraints(renderer)
    with pytest.raises(ApiError) as refused:
        asyncio.run(constraints.of(asking(tools=TOOLS, tool_choice="required")))
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")
    assert "not known" in refused.value.message
    alone = asyncio.run(constraints.of(asking(response_format={"type": "json_object"})))
    assert alone is not None


def test_a_template_of_one_call_at_a_time(live: Live) -> None:
    own = live.base.tokenizer.get_chat_template()
    only_one = (
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('x') }}{% endif %}"
    )
    renderer = live.speaker(f"{{% for m in messages %}}{only_one}{{% endfor %}}{own}")
    form = probe_tool_form(renderer)
    several = probe_tool_form(Renderer(live.base.tokenizer))
    assert several is not None
    assert form == replace(several, between=None)
    assert several.between is not None
    asked = asking(tools=TOOLS, tool_choice="required")
    one = asyncio.run(Constraints(renderer).of(asked))
    limited = asking(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    same = asyncio.run(Constraints(Renderer(live.base.tokenizer)).of(limited))
    assert one == same


@pytest.mark.parametrize("opened", [False, True], ids=["optional", "opened"])
def test_reasoning_comes_before_what_is_constrained(live: Live, opened: bool) -> None:
    template = live.base.tokenizer.get_chat_template()
    if opened:
        begin = "'<|im_start|>assistant\\n' -}}{%- endif -%}"
        template = template.replace(begin, begin.replace("n'", "n<think>\\n'"))
    renderer = live.speaker(template)
    assert ("<think>" in renderer.generation_prompt) == opened
    asked = [
        asking(response_format=_format(PLACE)),
        asking(tools=TOOLS, tool_choice="required"),
    ]
    answers = ['{"city": "東京", "days": 3}', _called("give_up", "{}")]
    for request, answer in zip(asked, answers, strict=True):
        thought = ("" if opened else "<think>\n") + 'It is {"big"}.\n</think>\n\n' + answer
        for text, fits in ((thought, True), (answer, not opened), (thought + " ", False)):
            assert accepts(live, renderer, request, text) == fits, text
        reply = renderer.parse(renderer.encode(thought), tools=request.tools is not None)
        assert reply.reasoning == 'It is {"big"}.'
        assert (reply.content or reply.tool_calls[0].name) in (answer, "give_up")


def test_no_reasoning_is_open_where_the_template_opened_no_turn(live: Live) -> None:
    """DeepSeek R1's template opens a thought with the turn, and no turn after a tool's result."""
    renderer = live.speaker(FAMILIES["deepseek-r1"].template)
    assert "<think>" in renderer.generation_prompt
    request = asking(response_format=_format(PLACE))
    answer = '{"city": "Paris", "days": 3}'
    for opened, text, fits in (
        (True, answer, False),
        (True, f"So.</think>\n\n{answer}", True),
        (False, answer, True),
        (False, f"<think>So.</think>\n\n{answer}", True),
        (False, f"So.</think>\n\n{answer}", False),
    ):
        opening = None if opened else ""
        assert accepts(live, renderer, request, text, opening=opening) == fits, (opened, text)


def accepts(
    live: Live, renderer: Renderer, request: ChatRequest, text: str, *, opening: str | None = None
) -> bool:
    """Whether the grammar allows this answer."""
    tokenizer = renderer.tokenizer
    grammars = Grammars(tokenizer, live.base.model.config.vocab_size, live.base.eos_ids)
    constraint = asyncio.run(Constraints(renderer).of(request, opening=opening))
    assert constraint is not None
    state = grammars.start(constraint.grammar)
    return all(state.push(i) for i in [*renderer.encode(text), tokenizer.eos_token_id])


def _called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
