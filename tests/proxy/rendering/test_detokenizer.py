"""Text from tokens: whole characters, stop strings, replies in pieces."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.detokenizer import Detokenizer, whole_text
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply

TEXTS = [
    "plain",
    "grüße 日本語 👍🏽 naïve",
    "<think>\nso\n</think>\n\nanswer",
    'a\n<tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>',
    "1 < 2 and <b>bold</b>  \n ",
    "<tool_call>broken",
    "   \n",
    "",
]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_in_pieces_or_whole_a_reply_reads_the_same(
    renderer: Renderer, text: str, tools: bool
) -> None:
    whole = renderer.parser(tools=tools).finish(text)
    for seed in range(10):
        chosen = random.Random(seed)
        pieces = renderer.parser(tools=tools)
        shown, rest = list[ParsedReply](), text
        while rest:
            cut = chosen.randint(1, 6)
            shown.append(pieces.feed(rest[:cut]))
            rest = rest[cut:]
        end = pieces.finish()
        shown.append(pieces.remainder(end))
        assert end == whole
        assert "".join(one.content for one in shown) == whole.content
        assert "".join(one.reasoning for one in shown) == whole.reasoning


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_stream_as_they_decode(renderer: Renderer, seed: int) -> None:
    """Any ids at all: broken UTF-8, special tokens between, stop strings anywhere."""
    chosen = random.Random(seed)
    vocabulary = len(renderer.tokenizer)
    ids = [chosen.randrange(3, vocabulary if seed % 2 else 260) for _ in range(200)]
    text = whole_text(renderer.decode_raw, ids, ())
    for stop in ((), (text[50:53],), (text[100:101], text[40:47])):
        stop = tuple(s for s in stop if s)
        tokens = Detokenizer(renderer.decode_raw, stop)
        streamed = "".join([tokens.push(i) for i in ids]) + tokens.finish()
        assert streamed == whole_text(renderer.decode_raw, ids, stop)
        assert not any(s in streamed for s in stop)


def test_nothing_of_a_stop_string_is_ever_shown(renderer: Renderer) -> None:
    ids = [i for char in "Thought: x\nObservation: y" for i in renderer.encode(char)]
    tokens = Detokenizer(renderer.decode_raw, ["\nObservation:", "\nO!"])
    shown = [tokens.push(i) for i in ids]
    assert "".join(shown) == "Thought: x"
    held = Detokenizer(renderer.decode_raw, ["\nObservation:"])
    assert "".join([held.push(i) for i in ids[:14]]) == "Thought: x"
    assert held.finish() == "\nObs"  # it was none after all


def test_half_a_character_waits(renderer: Renderer) -> None:
    ids = renderer.encode("\U0001f9a6")
    assert len(ids) > 1
    tokens = Detokenizer(renderer.decode_raw)
    shown = [tokens.push(i) for i in ids]
    assert shown == [""] * (len(ids) - 1) + ["\U0001f9a6"]
    assert b"".join(renderer.token_bytes(i) for i in ids).decode() == "\U0001f9a6"


def test_parse(renderer: Renderer) -> None:
    text = "<think>\nhm\n</think>\n\nLook.\n"
    text += '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    ids = [*renderer.encode(text), renderer.tokenizer.eos_token_id]
    reply = renderer.parse(ids)
    assert (reply.content, reply.reasoning) == ("Look.", "hm")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("f", '{"x": 1}')]
    assert renderer.parse(ids, tools=False).content.startswith("Look.\n<tool_call>")


def test_a_prefilled_think_is_reasoning(tokenizer: Any) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = thinking.chat_template.replace(
        "'<|im_start|>assistant\\n' -}}{%- endif -%}",
        "'<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}",
    )
    renderer = Renderer(thinking)
    assert renderer.generation_prompt.endswith("<think>\n")
    reply = renderer.parse(renderer.encode("let me see\n</think>\n\n42"))
    assert (reply.reasoning, reply.content) == ("let me see", "42")


def test_developer_becomes_system(tokenizer: Any) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}"
    )
    renderer = Renderer(plain)
    text = renderer.decode_raw(renderer.render([{"role": "developer", "content": "x"}]))
    assert text == "[system]x"
    with pytest.raises(ApiError, match="unknown role tool") as caught:
        renderer.render([{"role": "tool", "content": "x"}])
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_templates_get_arguments_as_values(renderer: Renderer) -> None:
    call = {"function": {"name": "f", "arguments": '{"big": 123456789012345678901234, "b": [1]}'}}
    normal = renderer.normalize([{"role": "assistant", "content": None, "tool_calls": [call]}])
    arguments = normal[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"big": 123456789012345678901234, "b": [1]}
