"""Families that do not write tool calls as Qwen, Llama and DeepSeek do: the published templates."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from typing import Any

import pytest
from family_templates import published

from agentrl.datasets.chats import to_chat
from agentrl.datasets.rendering import chat_rows
from agentrl_proxy.protocols.chat import chat_request
from agentrl_proxy.rendering.continuity import Conversations, remember_reply, render_prompt
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply, read_python_calls
from agentrl_proxy.rendering.structured_output import Constraints, reads_calls
from agentrl_trainer.inference.grammar import Grammars

FAMILIES = [
    "gptoss", "glm4moe", "gemma4", "gemma4_v5", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "mistral"
]  # fmt: skip
STOPS = {
    "gptoss": ["<|return|>", "<|call|>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "lfm2": ["<|im_end|>"],
    "mistral": ["</s>"],
}
"""What ends an answer, by the models' generation_config; the second ends one with a tool call."""
THOUGHTLESS = ("gemma4", "lfm2_v2", "mistral")  # their templates write no thoughts of the past
ARGUMENTS = {"q": 'köln, "mitte" <b>\n x = f(1)', "n": 3, "deep": {"a": [1, {"b": {}}], "c": True}}
SCHEMA = {"q": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name, "description": "", "parameters": {"type": "object", "properties": SCHEMA}
        },
    }
    for name in ("search", "look_up")
]  # fmt: skip
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
    "{% endfor %}</s>{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
"""In the shape of Ministral 3's, which TRL has not."""
USER = {"role": "user", "content": "Where is Köln?"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def speaker(tokenizer: Any, family: str) -> Renderer:
    return made(tokenizer, family)


def made(tokenizer: Any, family: str, **kwargs: Any) -> Renderer:
    own = copy.deepcopy(tokenizer)
    own.chat_template = MISTRAL if family == "mistral" else published(family)
    marks = set(re.findall(r"<\|?[a-z_\"]+\|?>|\[/?[A-Z_]+\]", own.chat_template))
    stops = next(found for name, found in STOPS.items() if family.startswith(name))
    special = [mark for mark in marks if "|" in mark or "[" in mark] + stops
    own.add_special_tokens({"additional_special_tokens": sorted({*special})})
    own.bos_token = stops[0]
    return Renderer(own, stop_ids=own.convert_tokens_to_ids(stops), template_kwargs=kwargs)


def calling(
    *calls: tuple[str, dict[str, Any]], content: str = "", thought: str = ""
) -> dict[str, Any]:
    listed = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]
    reply = {"role": "assistant", "content": content, "tool_calls": listed}
    return reply | ({"reasoning_content": thought} if thought else {})


def written(speaker: Renderer, reply: dict[str, Any]) -> str:
    """What the template writes for a reply, as the model would say it."""
    asked = speaker.text(speaker.normalize([USER]), TOOLS)
    whole = speaker.text(speaker.normalize([USER, reply]), TOOLS, generate=False)
    assert whole.startswith(asked)
    ids = speaker.encode(whole.removeprefix(asked))
    stops = [i for i, token in enumerate(ids) if speaker.is_stop(token)]
    return speaker.decode(ids[: stops[0]] if stops else ids)


def read(speaker: Renderer, text: str, size: int = 10_000) -> ParsedReply:
    """Read a reply in pieces, which must add up to what the whole is."""
    parser, shown = speaker.parser(tools=TOOLS), ParsedReply()
    pieces = [parser.feed(text[i : i + size]) for i in range(0, len(text), size)]
    whole = parser.finish()
    for piece in (*pieces, parser.remainder(whole)):
        shown.content += piece.content
        shown.reasoning += piece.reasoning
        shown.tool_calls += piece.tool_calls
    assert shown == whole
    return whole


def arguments(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


def test_calls_are_known_to_be_read(speaker: Renderer) -> None:
    assert reads_calls(speaker)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_what_the_template_writes_is_read(family: str, speaker: Renderer, size: int) -> None:
    parallel = [("search", ARGUMENTS), ("look_up", {})][: 1 if family == "gptoss" else 2]
    thought = "" if family in THOUGHTLESS else "Hm, Köln."
    text = written(speaker, calling(*parallel, thought=thought))
    reply = read(speaker, text, size)
    assert arguments(reply) == parallel
    assert (reply.content, reply.reasoning) == ("", thought)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_text_before_a_call_and_an_answer_alone(family: str, speaker: Renderer, size: int) -> None:
    call = written(speaker, calling(("search", {"q": "x"})))
    before = {
        "gptoss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I will look.<|end|><|start|>assistant",
        "glm4moe": "\n<think>Hm.</think>\nI will look.",
    }.get(family, "I will look.")
    reply = read(speaker, before + call.removeprefix("\n<think></think>"), size)
    assert reply.content == "I will look."
    assert arguments(reply) == [("search", {"q": "x"})]
    answer = {"role": "assistant", "content": "It is in\n\nGermany."}
    reply = read(speaker, written(speaker, answer), size)
    assert reply == ParsedReply(content="It is in\n\nGermany.")


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize(
    "said",
    [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.search <|constrain|>json<|message|>{"q": "x"}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.search"
        '<|channel|>commentary json<|message|>{"q": "x"}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.search<|message|>{"q": "x"}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis "
        'to=functions.search <|constrain|>json<|message|>{"q": "x"}',
    ],
)
def test_calls_of_gpt_oss_in_every_form(tokenizer: Any, said: str, size: int) -> None:
    reply = read(made(tokenizer, "gptoss"), said, size)
    assert (reply.reasoning, reply.content) == ("Hm.", "")
    assert arguments(reply) == [("search", {"q": "x"})]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_channels_are_no_content_where_there_are_no_tools(tokenizer: Any, size: int) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    parser = made(tokenizer, "gptoss").parser(tools=False)
    said = f"{thought}<|channel|>final<|message|>Hello"
    for i in range(0, len(said), size):
        parser.feed(said[i : i + size])
    assert parser.finish() == ParsedReply("Hello", "Hm.")


def test_names_of_any_form_are_read(tokenizer: Any) -> None:
    asked = {"max-results": 3, "from": "x", "$filter": "", "a.b": [{"c-d": 1}], "ﬁle": "\x01"}
    for family in ("gemma4_v5", "lfm2_v2", "lfm2_2_5", "glm4moe"):
        speaker = made(tokenizer, family)
        call = calling(("get-weather", asked))
        tools = [{"type": "function", "function": {"name": "get-weather", "parameters": {}}}]
        parser = speaker.parser(tools=tools)
        found = arguments(parser.finish(written(speaker, call)))
        if family == "glm4moe":  # its notation has no types, and the tool's schema has none
            asked |= {"max-results": "3", "a.b": '[{"c-d": 1}]'}
        assert found == [("get-weather", asked)], family


@pytest.mark.parametrize("family", ["gptoss", "gemma4_v5", "glm4moe", "lfm2_2_5"])
def test_examples_with_tools_are_rows(tokenizer: Any, family: str) -> None:
    result = {"role": "tool", "tool_call_id": "c0", "content": "on the Rhine"}
    said = [
        USER,
        calling(("search", {"q": "x"})),
        result,
        {"role": "assistant", "content": "There."},
    ]
    speaker = made(tokenizer, family)
    rows = chat_rows(speaker, to_chat({"messages": said, "tools": TOOLS}), "all")
    both = zip(rows[-1].tokens, rows[-1].mask, strict=True)
    assert "There." in speaker.decode([i for i, on in both if on])
    assert (len(rows) == 1) == (family != "glm4moe")  # whose turns end with the next message


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|>[f(a='" + "\\'" * 50_000,
        "<|channel|>final<|constrain|>" + "a" * 50_000,
        " to=functions." + "a" * 50_000,
        "[TOOL_CALLS]" + "a" * 50_000,
        "<|tool_call>call:f{" + "a" * 50_000,
    ],
    ids=range(5),
)
def test_endless_text_is_read_in_linear_time(tokenizer: Any, text: str) -> None:
    """Quadratic time would take minutes."""
    for family in ("lfm2_2_5", "gptoss", "mistral", "gemma4_v5"):
        parser = made(tokenizer, family).parser(tools=TOOLS)
        for i in range(0, len(text), 20):
            parser.feed(text[i : i + 20])
        assert parser.finish().tool_calls == []


MALFORMED = {
    "gptoss": ' to=functions.search<|channel|>commentary json<|message|>{"q": ',
    "gemma4": '<|tool_call>call:search{q:<|"|>x<tool_call|>',
    "lfm2_v2": "<|tool_call_start|>[search(q='it's')]<|tool_call_end|>",
    "mistral": '[TOOL_CALLS]search[ARGS]{"q": ',
    "lfm2_2_5": "<|tool_call_start|>[search('x')]<|tool_call_end|>",
}


@pytest.mark.parametrize("family", MALFORMED)
def test_malformed_calls_are_text(family: str, speaker: Renderer) -> None:
    for size in (1, 10_000):
        reply = read(speaker, MALFORMED[family], size)
        assert (reply.content, reply.tool_calls) == (MALFORMED[family], [])


@pytest.mark.parametrize(
    ("family", "thinking"),
    [
        (one, thinking)
        for one in FAMILIES
        for thinking in (False, True)
        if not thinking or one not in THOUGHTLESS
    ],
)
def test_a_loop_of_tool_calls_continues_token_for_token(
    tokenizer: Any, family: str, thinking: bool
) -> None:
    switch = {"enable_thinking": True} if thinking and family.startswith("gemma") else {}
    speaker, conversations = made(tokenizer, family, **switch), Conversations()
    stops = [speaker.encode(stop)[0] for stop in STOPS[re.sub("_.*", "", family)]]
    messages: list[dict[str, Any]] = [USER]
    seen: list[int] = []
    thought = "Hm." if thinking else ""
    for turn in range(3):
        prompt = render_prompt(speaker, conversations, messages, TOOLS, None)
        assert prompt.ids[: len(seen)] == seen, (turn, speaker.decode_raw(prompt.ids))
        whole = [*messages, calling(("search", {"q": f"x{turn}"}), thought=thought)]
        text = speaker.text(speaker.normalize(whole), TOOLS, generate=False)
        said = text.removeprefix(prompt.text).removesuffix(speaker.ending(text) or "")
        cut = said.index("search") + 3  # not the tokens that the tokenizer would choose
        sampled = [*speaker.encode(said[:cut]), *speaker.encode(said[cut:])]
        assert sampled != speaker.encode(said)
        parser = speaker.parser(tools=TOOLS, opening=prompt.opening)
        found = parser.finish(speaker.decode(sampled))
        assert (found.reasoning, arguments(found)) == (thought, [("search", {"q": f"x{turn}"})])
        sampled.append(stops[-1])
        reply: dict[str, Any] = {"role": "assistant", "content": found.content}
        reply["tool_calls"] = [call.as_dict() for call in found.tool_calls]
        reply |= {"reasoning_content": found.reasoning} if found.reasoning else {}
        remember_reply(speaker, conversations, prompt, reply, sampled, said, cut=False)
        seen = [*prompt.ids, *sampled]
        result = {"role": "tool", "tool_call_id": found.tool_calls[0].id, "content": "on the Rhine"}
        messages += [reply, result]
    last = render_prompt(speaker, conversations, messages, TOOLS, None)
    assert last.ids[: len(seen)] == seen
    assert last.branched is None


def test_a_new_question_continues_glms_answer(tokenizer: Any) -> None:
    """Its template ends no turn: the next message's begin does."""
    glm, conversations = made(tokenizer, "glm4moe"), Conversations()
    prompt = render_prompt(glm, conversations, [USER], None, None)
    reply = {"role": "assistant", "content": "On the Rhine."}
    said = "\n<think></think>\nOn the Rhine."
    sampled = [*glm.encode(said), *glm.encode("<|user|>")]
    remember_reply(glm, conversations, prompt, reply, sampled, said, cut=False)
    asked = [USER, reply, {"role": "user", "content": "And Bonn?"}]
    later = render_prompt(glm, conversations, asked, None, None)
    assert later.branched is None
    assert later.ids[: len(prompt.ids) + len(sampled)] == [*prompt.ids, *sampled]


def test_a_thought_beside_content_reaches_gpt_oss(tokenizer: Any) -> None:
    """Its template refuses both, and reads thoughts under a name of its own."""
    told = [USER, calling(("search", {}), content="I will look.", thought="Hm.")]
    renderer = made(tokenizer, "gptoss")
    assert "analysis<|message|>Hm.\n\nI will look.<|end|>" in renderer.text(
        renderer.normalize(told), None, generate=False
    )


def test_what_is_demanded_of_gpt_oss_stands_in_its_channels(tokenizer: Any) -> None:
    speaker = made(tokenizer, "gptoss")
    grammars = Grammars(
        speaker.tokenizer, len(speaker.tokenizer), frozenset({speaker.tokenizer.eos_token_id})
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = '<|channel|>final<|message|>{"q": "x"}'
    call = ' to=functions.look_up<|channel|>commentary json<|message|>{"q": "x"}'
    schema = {"type": "object", "properties": SCHEMA}
    json_schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    asked = {"response_format": json_schema}
    for body, fits in ((asked, answer), ({"tools": TOOLS, "tool_choice": "required"}, call)):
        request = chat_request({"model": "m", "messages": [USER], **body})
        constraint = asyncio.run(Constraints(speaker).of(request))
        assert constraint is not None
        for text in (answer, call, thought + answer, thought + call, '{"q": "x"}'):
            state = grammars.start(constraint.grammar)
            ids = [*speaker.encode(text), speaker.tokenizer.eos_token_id]
            assert all(state.push(i) for i in ids) == text.endswith(fits), text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a=1, b='x'), g()]", [("f", {"a": 1, "b": "x"}), ("g", {})]),
        (r"[f(a='it\'s\n', b=-1.5)]", [("f", {"a": "it's\n", "b": -1.5})]),
        ("[f(a='two\nlines', b=[true, null])]", [("f", {"a": "two\nlines", "b": [True, None]})]),
        ('[a.b(c={"d": true})]', [("a.b", {"c": {"d": True}})]),
    ],
)
def test_python_calls(text: str, calls: list[tuple[str, Any]]) -> None:
    assert arguments(ParsedReply(tool_calls=read_python_calls(text))) == calls


@pytest.mark.parametrize(
    "text",
    ["", "f(a=1)", "[f(1)]", "[f(**a)]", "[f(a=b)]", "[f(a=g())]", "[3]", "[f(a={1})]", "[" * 9999,
     "[f(a=" + "-" * 99_999 + "1)]", "[f()()]", "[(n99)(a=1)]", "[f(a=1, a=2)]", "[f(a=1e999)]"],
)  # fmt: skip
def test_what_is_no_list_of_calls(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_python_calls(text)
