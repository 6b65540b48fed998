"""One conversation, told in three protocols, is one prompt: thinking, calls and results too."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from scripted_sampler import Running

SAID = (
    '<think>\nhm, grüße\n</think>\n\nLet me look.\n<tool_call>\n{"name": "search", "arguments": '
    '{"q": "köln", "deep": {"a": [1, 2.5, null, true]}}}\n</tool_call>'
)
SCHEMA: Any = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
FUNCTION: Any = {"name": "search", "description": "looks up", "parameters": SCHEMA}


def test_one_conversation_is_one_prompt(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: SAID
    chat, messages, responses = gateway.claims
    settings: Any = {"max_retries": 0, "timeout": 30}

    with openai.OpenAI(base_url=gateway.base_url(chat), api_key=chat.key, **settings) as api:
        asked: list[Any] = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "Find it."},
        ]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        reply = api.chat.completions.create(model="policy", messages=asked, tools=tools)
        message = reply.choices[0].message
        assert message.tool_calls
        asked += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found"},
            {"role": "user", "content": "And?"},
        ]
        api.chat.completions.create(model="policy", messages=asked, tools=tools)

    url = gateway.base_url(messages).removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=messages.key, **settings) as api:
        said: list[Any] = [{"role": "user", "content": "Find it."}]
        more: Any = {
            "model": "policy",
            "max_tokens": 256,
            "system": "s",
            "tools": [{"name": "search", "description": "looks up", "input_schema": SCHEMA}],
        }
        made = api.messages.create(messages=said, **more)
        assert made.content[-1].type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "found"}
        said += [
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        api.messages.create(messages=said, **more)

    with openai.OpenAI(base_url=gateway.base_url(responses), api_key=responses.key) as api:
        items: list[Any] = [{"role": "user", "content": "Find it."}]
        more = {
            "model": "policy",
            "instructions": "s",
            "tools": [{"type": "function", **FUNCTION}],
        }
        answer = api.responses.create(input=items, **more)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        assert answer.output[-1].type == "function_call"
        call_id = answer.output[-1].call_id
        items += [
            {"type": "function_call_output", "call_id": call_id, "output": "found"},
            {"role": "user", "content": "And?"},
        ]
        api.responses.create(input=items, **more)

    first, second = zip(*(gateway.calls(claim) for claim in gateway.claims), strict=True)
    texts = [gateway.renderer.decode_raw(call.prompt_ids) for call in first]
    assert texts[0] == texts[1] == texts[2]
    assert json.dumps(SCHEMA)[:40] in texts[0]
    texts = [gateway.renderer.decode_raw(call.prompt_ids) for call in second]
    assert texts[0] == texts[1] == texts[2]
    assert [call.prompt_ids for call in second] == [second[0].prompt_ids] * 3
    assert len({call.params["continued"] for call in second}) == 1
