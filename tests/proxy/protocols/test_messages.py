"""Anthropic's Messages API through the real server with the real client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from official_clients import CALL, USER, claude
from scripted_sampler import Running
from speakers import CLAUDE_TOOL, FUNCTION

from agentrl_tracer.schemas import CallState

TOOLS: Any = [CLAUDE_TOOL]
ASKED: Any = {"model": "policy", "max_tokens": 200, "messages": USER}


def blocks(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in message.content]


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_and_their_events(gateway: Running, stream: bool) -> None:
    gateway.sampler.script = lambda *_: f"<think>\nhm\n</think>\n\nLook.{CALL}\n{CALL}"
    with claude(gateway) as api:
        message = api.messages.create(**ASKED, tools=TOOLS)
        if stream:
            with api.messages.stream(**ASKED, tools=TOOLS) as made:
                message = made.get_final_message()
        events: Any = list(api.messages.create(**ASKED, tools=TOOLS, stream=True))
    said = blocks(message)
    ids = [block.pop("id") for block in said[2:]]
    call = {"type": "tool_use", "name": "search", "input": {"q": "köln", "k": 3}}
    assert said == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Look."},
        call,
        call,
    ]
    assert len({*ids}) == 2
    assert (message.type, message.role, message.model) == ("message", "assistant", "policy")
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    inner = [kind.removeprefix("content_block_") for kind in kinds[1:-2]]
    assert set(inner) == {"start", "delta", "stop"}
    for kind in ("start", "stop"):
        at = [event.index for event in events if event.type == f"content_block_{kind}"]
        assert at == [0, 1, 2, 3]
    recorded = gateway.calls(gateway.claims[0])[-1]
    assert events[0].message.usage.input_tokens == len(recorded.prompt_ids)
    assert events[0].message.id == recorded.response_id


def test_stop_sequences(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: "one two three four"
    asked: Any = ASKED | {"stop_sequences": [" four", " thr"]}
    with claude(gateway) as api:
        message = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        cut = api.messages.create(**ASKED | {"max_tokens": 2})
    for made in (message, streamed):
        assert blocks(made) == [{"type": "text", "text": "one two"}]
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", " thr")
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_tools_and_their_choice_reach_the_model(gateway: Running) -> None:
    with claude(gateway) as api:
        for choice in ("auto", "any", "none"):
            api.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": choice})
    with_tools, required, without = (seen.prompt_ids for seen in gateway.sampler.requests)
    same = [{"type": "function", "function": FUNCTION}]
    assert with_tools == required == gateway.renderer.render(USER, same)
    assert without == gateway.renderer.render(USER)


def test_long_tool_names_come_back_whole(gateway: Running) -> None:
    name = "search_" * 12

    def script(prompt: Any, *_: Any) -> str:
        told = gateway.renderer.decode_raw(prompt).split('"name": "')[1].split('"')[0]
        return f'<tool_call>\n{{"name": "{told}", "arguments": {{}}}}\n</tool_call>'

    gateway.sampler.script = script
    tools: Any = [{**CLAUDE_TOOL, "name": name}]
    with claude(gateway) as api:
        message = api.messages.create(**ASKED, tools=tools)
        with api.messages.stream(**ASKED, tools=tools) as stream:
            streamed = stream.get_final_message()
    assert [blocks(made)[0]["name"] for made in (message, streamed)] == [name, name]


def test_a_conversation_may_change_protocol(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: f"Hm.\n{CALL}"
    claim = gateway.claims[0]
    with claude(gateway) as api:
        text, call = blocks(api.messages.create(**ASKED, tools=TOOLS))
    function = {"name": "search", "arguments": json.dumps(call["input"])}
    calls = [{"id": call["id"], "type": "function", "function": function}]
    spoken: Any = [
        *USER,
        {"role": "assistant", "content": text["text"], "tool_calls": calls},
        {"role": "tool", "tool_call_id": call["id"], "content": "found"},
    ]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    with openai.OpenAI(base_url=gateway.base_url(claim), api_key=claim.key) as chat:
        chat.chat.completions.create(model="policy", messages=spoken, tools=tools)
    first, second = gateway.calls(claim)
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known


def test_count_tokens(gateway: Running) -> None:
    asked: Any = {"model": "policy", "messages": USER, "system": "Be brief.", "tools": TOOLS}
    with claude(gateway) as api:
        counted = api.messages.count_tokens(**asked)
        assert gateway.calls(gateway.claims[0]) == []
        message = api.messages.create(**asked, max_tokens=9)
    assert counted.input_tokens == message.usage.input_tokens
    [seen] = gateway.sampler.requests
    assert seen.params.max_tokens == 9


def test_a_call_that_breaks_is_text_in_a_stream_too(gateway: Running) -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"q": "a", "k": oops}}\n</tool_call>'
    gateway.sampler.script = lambda *_: text
    with claude(gateway) as api:
        whole = api.messages.create(**ASKED, tools=TOOLS)
        events: Any = list(api.messages.create(**ASKED, tools=TOOLS, stream=True))
    assert blocks(whole) == [{"type": "text", "text": text}]
    assert events[-1].type == "message_stop"
    begun = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert begun == ["text"]
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == text
    calls = gateway.calls(gateway.claims[0])
    assert {call.state for call in calls} == {CallState.COMPLETED}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("not found", "Error: not found"),
        ([{"type": "text", "text": "not"}, {"type": "text", "text": "found"}], "Error: not"),
        ([], "Error: "),
        (None, "Error: "),
    ],
)
def test_the_model_sees_that_a_tool_failed(gateway: Running, content: Any, told: str) -> None:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t"}
    result |= {} if content is None else {"content": content}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    with claude(gateway) as api:
        for failed in ({"is_error": True}, {"is_error": False}, {}):
            messages: Any = [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result | failed]},
            ]
            api.messages.create(model="policy", max_tokens=5, messages=messages)
    prompts = [gateway.renderer.decode_raw(seen.prompt_ids) for seen in gateway.sampler.requests]
    assert f"<tool_response>\n{told}" in prompts[0]
    assert "Error" not in prompts[1] + prompts[2]


def test_what_claude_code_sends_continues_token_for_token(gateway: Running) -> None:
    """Betas, system blocks, thinking and effort; marks of the cache move from turn to turn."""
    gateway.sampler.script = lambda *_: f"Look.{CALL}"
    mark: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
        {"type": "text", "text": "You are Claude Code.", **mark},
    ]
    asked: Any = {
        "model": "policy", "max_tokens": 200, "system": system, "tools": [{**TOOLS[0], **mark}],
        "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "effort-2025-11-24"],
    }  # fmt: skip
    first: Any = {"role": "user", "content": [{"type": "text", "text": "Hi.", **mark}]}
    with claude(gateway) as api:
        said = api.beta.messages.create(**asked, messages=[first])
        [text, call] = [block.model_dump(exclude_none=True) for block in said.content]
        result: Any = {"type": "tool_result", "tool_use_id": call["id"], "content": "found"}
        turns: Any = [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": [text, call]},
            {"role": "user", "content": [{**result, **mark}]},
        ]
        again = api.beta.messages.create(**asked, messages=turns)
        counted = api.beta.messages.count_tokens(
            **{
                name: value
                for name, value in asked.items()
                if name not in ("max_tokens", "metadata")
            },
            messages=turns,
        )
    one, two = gateway.calls(gateway.claims[0])
    known = one.prompt_ids + one.response_ids
    assert two.prompt_ids[: len(known)] == known
    assert two.params.get("branched") is None
    assert counted.input_tokens == again.usage.input_tokens == len(two.prompt_ids)
    assert one.request is not None
    assert one.request["system"] == system  # recorded as sent
