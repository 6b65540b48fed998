"""Anthropic's Messages API through the real server with the real client."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_client import wait_until
from official_clients import CALL, USER, claude
from scripted_sampler import Running

from agentrl_tracer.schemas import CallState, SkipReason

TOOLS: Any = [
    {
        "name": "search",
        "description": "looks things up",
        "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
    }
]
OTHER = '<tool_call>\n{"name": "search", "arguments": {"q": "bonn"}}\n</tool_call>'


def blocks(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def test_message_is_recorded_token_for_token(gateway: Running) -> None:
    with claude(gateway) as api:
        message = api.messages.create(
            model="claude-sonnet-5", max_tokens=99, messages=USER, system="Be brief.",
            metadata={"user_id": "u"},
            # Clients before version 2 had arguments for these.
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        )  # fmt: skip
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(gateway.claims[0])
    chat = [{"role": "system", "content": "Be brief."}, *USER]
    assert call.prompt_ids == seen.prompt_ids == gateway.renderer.render(chat)
    assert call.response_ids == seen.sampled[0]
    assert call.response_logprobs == [-0.25 - i / 64 for i in range(len(call.response_ids))]
    assert call.id == call.response_id == message.id
    assert message.id.startswith("msg_")
    assert (seen.params.temperature, seen.params.top_p, seen.params.top_k) == (0.5, 0.9, 7)
    assert seen.params.max_tokens == 99
    assert blocks(message) == [{"type": "text", "text": gateway.renderer.decode(seen.sampled[0])}]
    assert (message.type, message.role, message.model) == (
        "message", "assistant", "claude-sonnet-5",
    )  # fmt: skip
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens == len(call.prompt_ids)
    assert message.usage.output_tokens == len(call.response_ids)
    assert call.request is not None
    assert call.request["system"] == "Be brief."
    assert call.response is not None
    assert call.response["id"] == message.id
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("seed", range(3))
def test_stream_says_what_the_whole_message_says(gateway: Running, seed: int) -> None:
    gateway.sampler.script = lambda prompt, params, choice: [
        f"<think>\nhm {seed}\n</think>\n\nLet me look. {CALL}\n{OTHER}",
        "Just grüße 👍 text",
        f"{CALL}",
    ][seed]
    asked: Any = {"model": "policy", "max_tokens": 200, "messages": USER, "tools": TOOLS}
    with claude(gateway) as api:
        whole = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        raw = list(api.messages.create(**asked, stream=True))
    said, again = blocks(whole), blocks(streamed)
    for block in (*said, *again):
        block.pop("id", None)
    assert again == said
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    started = raw[0]
    assert started.type == "message_start"
    calls = gateway.calls(gateway.claims[0])
    assert started.message.usage.input_tokens == len(calls[2].prompt_ids)
    assert [call.response_id for call in calls] == [whole.id, streamed.id, started.message.id]
    for event in raw:
        assert event.type in (
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        )  # fmt: skip
    starts = [event.index for event in raw if event.type == "content_block_start"]
    stops = [event.index for event in raw if event.type == "content_block_stop"]
    assert starts == stops == list(range(len(said)))
    expected = [
        [
            {"type": "thinking", "thinking": "hm 0", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "name": "search", "input": {"q": "köln", "k": 3}},
            {"type": "tool_use", "name": "search", "input": {"q": "bonn"}},
        ],
        [{"type": "text", "text": "Just grüße 👍 text"}],
        [{"type": "tool_use", "name": "search", "input": {"q": "köln", "k": 3}}],
    ][seed]
    for block in said:
        if "text" in block:
            block["text"] = block["text"].rstrip()
    assert said == expected
    assert whole.stop_reason == ("end_turn" if seed == 1 else "tool_use")


def test_text_arrives_as_it_is_sampled(gateway: Running) -> None:
    gateway.sampler.delay = 0.03
    with claude(gateway) as api:
        started = time.monotonic()
        times = [
            time.monotonic() - started
            for event in api.messages.create(
                model="policy", max_tokens=40, messages=USER, stream=True
            )
            if event.type == "content_block_delta"
        ]
    assert len(times) > 10
    assert times[0] < times[-1] / 2


def test_stop_sequences(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: "one two three four"
    asked: Any = {
        "model": "policy", "max_tokens": 99, "messages": USER, "stop_sequences": [" four", " thr"],
    }  # fmt: skip
    with claude(gateway) as api:
        message = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        cut = api.messages.create(model="policy", max_tokens=2, messages=USER)
    for made in (message, streamed):
        assert blocks(made) == [{"type": "text", "text": "one two"}]
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", " thr")
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_tools_and_their_choice_reach_the_model(gateway: Running) -> None:
    same = [
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "looks things up",
                "parameters": TOOLS[0]["input_schema"],
            },
        }
    ]
    with claude(gateway) as api:
        for choice in ("auto", "any", "none"):
            asked: Any = {"tools": TOOLS, "tool_choice": {"type": choice}}
            api.messages.create(model="policy", max_tokens=9, messages=USER, **asked)
    with_tools, required, without = (seen.prompt_ids for seen in gateway.sampler.requests)
    assert with_tools == required == gateway.renderer.render(USER, same)
    assert without == gateway.renderer.render(USER)


def test_long_tool_names_come_back_whole(gateway: Running) -> None:
    name = "search_" * 12
    asked: list[str] = []

    def script(prompt: Any, *_: Any) -> str:
        text = gateway.renderer.decode_raw(prompt)
        told = text.split('"name": "')[1].split('"')[0]
        asked.append(told)
        return f'<tool_call>\n{{"name": "{told}", "arguments": {{}}}}\n</tool_call>'

    gateway.sampler.script = script
    tools: Any = [{**TOOLS[0], "name": name}]
    with claude(gateway) as api:
        message = api.messages.create(model="policy", max_tokens=200, messages=USER, tools=tools)
        with api.messages.stream(
            model="policy", max_tokens=200, messages=USER, tools=tools
        ) as stream:
            streamed = stream.get_final_message()
    assert message.content[0].type == "tool_use"
    assert streamed.content[0].type == "tool_use"
    assert message.content[0].name == streamed.content[0].name == name


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_keeps_its_exact_tokens(gateway: Running, stream: bool) -> None:
    """Twelve turns of calls and results, each of which continues the tokens of the one before."""
    turns = [
        f"Let me look.\n{CALL}\n{OTHER}", CALL, "It is 7.", f"Again:\n\n{OTHER}",
        '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"q": [1, 2.50, null, {"a": "<b>"}]}}'
        "\n</tool_call>",
    ] * 2  # fmt: skip
    said = iter(turns)
    gateway.sampler.script = lambda *_: next(said)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Find 7."}]}]
    with claude(gateway) as api:
        for turn in range(len(turns)):
            asked: Any = {
                "model": "policy", "max_tokens": 200, "messages": messages, "tools": TOOLS,
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            }  # fmt: skip
            if stream:
                with api.messages.stream(**asked) as made:
                    message = made.get_final_message()
            else:
                message = api.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"found {turn}"}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or f"go on {turn}"})
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == 12
    for before, after in itertools.pairwise(calls):
        known = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(known)] == known
        assert after.params["continued"] is True
    assert gateway.stats["continued"] == 11


def test_a_conversation_may_change_protocol(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: f"Hm.\n{CALL}"
    claim = gateway.claims[0]
    with claude(gateway) as api:
        message = api.messages.create(model="policy", max_tokens=99, messages=USER, tools=TOOLS)
    call = message.content[1]
    assert call.type == "tool_use"
    assert message.content[0].type == "text"
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "search",
                "parameters": TOOLS[0]["input_schema"],
                "description": "looks things up",
            },
        }
    ]
    spoken: Any = [
        *USER,
        {
            "role": "assistant",
            "content": message.content[0].text,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "search", "arguments": json.dumps(call.input)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    with openai.OpenAI(base_url=gateway.base_url(claim), api_key=claim.key) as chat:
        chat.chat.completions.create(model="policy", messages=spoken, tools=tools)
    first, second = gateway.calls(claim)
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known


def test_count_tokens(gateway: Running) -> None:
    with claude(gateway) as api:
        counted = api.messages.count_tokens(
            model="policy", messages=USER, system="Be brief.", tools=TOOLS
        )
        assert gateway.calls(gateway.claims[0]) == []
        message = api.messages.create(
            model="policy", max_tokens=9, messages=USER, system="Be brief.", tools=TOOLS
        )
    assert counted.input_tokens == message.usage.input_tokens
    assert gateway.sampler.requests[0].params.max_tokens == 9
    assert len(gateway.sampler.requests) == 1


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [*USER, {"role": "assistant", "content": "I am"}]}, "prefilling"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
        ({"system": 3}, "system"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [3]}, "stop"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
        ({"output_config": 3}, "output_config"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
    ],
)
def test_bad_fields_are_named(gateway: Running, more: dict[str, Any], named: str) -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": USER} | more
    with claude(gateway) as api, pytest.raises(anthropic.BadRequestError) as caught:
        api.post("/v1/messages", body=body, cast_to=httpx.Response)
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert named in caught.value.body["error"]["message"]  # type: ignore[index]
    assert gateway.calls(gateway.claims[0]) == []


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_anthropics(gateway: Running, stream: bool) -> None:
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": USER, "stream": stream}
    api = claude(gateway, api_key="sk-agentrl-wrong")
    with api, pytest.raises(anthropic.AuthenticationError) as unknown:
        api.messages.create(**asked)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    api = claude(gateway, api_key=gateway.claims[1].key)
    with api, pytest.raises(anthropic.PermissionDeniedError) as others:
        api.messages.create(**asked)
    assert others.value.body["error"]["type"] == "permission_error"  # type: ignore[index]
    gateway.sampler.fail_after = 0
    with claude(gateway) as api:
        with pytest.raises(anthropic.InternalServerError) as broken:
            api.messages.create(**asked)
        assert broken.value.status_code == 503
        gateway.sampler.fail_after = None
        gateway.seal(gateway.claims[0])
        with pytest.raises(anthropic.ConflictError) as sealed:
            api.messages.create(**asked)
    assert sealed.value.body["type"] == "error"  # type: ignore[index]
    assert "this attempt is over" in sealed.value.body["error"]["message"]  # type: ignore[index]


def test_an_error_in_mid_stream(gateway: Running) -> None:
    gateway.sampler.fail_after = 4
    with claude(gateway) as api, pytest.raises(anthropic.APIStatusError) as caught:
        list(api.messages.create(model="policy", max_tokens=99, messages=USER, stream=True))
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.ERROR
    assert len(call.response_ids) == 4


def test_a_client_that_leaves_cancels_the_sampling(gateway: Running) -> None:
    gateway.sampler.delay = 0.02
    gateway.sampler.script = lambda *_: "word " * 200
    with claude(gateway) as api:
        stream = api.messages.create(model="policy", max_tokens=256, messages=USER, stream=True)
        for event in stream:
            if event.type == "content_block_delta":
                break
        stream.close()
        wait_until(lambda: gateway.sampler.requests[0].cancelled)
    wait_until(lambda: gateway.calls(gateway.claims[0])[0].ended_at)
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.CANCELLED
    assert call.skip_reason is SkipReason.CLIENT_DISCONNECTED
    sampled = gateway.sampler.requests[0].sampled[0]
    assert 0 < len(call.response_ids) <= len(sampled) < 200
    assert call.response_ids == sampled[: len(call.response_ids)]


def test_a_marked_retry_is_replayed(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: f"Let me look.\n{CALL}\n{OTHER}"
    marked = {"x-stainless-retry-count": "1"}
    asked: Any = {"model": "policy", "max_tokens": 200, "messages": USER, "tools": TOOLS}
    with claude(gateway) as api:
        first = api.messages.create(**asked)
        again = api.messages.create(**asked, extra_headers=marked)
        made = [api.messages.create(**asked, stream=True, extra_headers=marked) for _ in range(2)]
        texts = [
            [event.model_dump_json() for event in stream if event.type != "message_start"]
            for stream in made
        ]
    assert again == first
    assert len(gateway.sampler.requests) == 2  # one whole, one streamed

    def joined(events: list[str]) -> str:
        deltas = [json.loads(event).get("delta", {}) for event in events]
        said = "".join(d.get("text", "") + d.get("partial_json", "") for d in deltas)
        return said.replace(" ", "")  # the store keeps a tool's input as values

    assert joined(texts[0]) == joined(texts[1]) != ""


async def test_async_client(gateway: Running) -> None:
    claim = gateway.claims[0]
    url = gateway.base_url(claim).removesuffix("/v1")
    api = anthropic.AsyncAnthropic(base_url=url, api_key=claim.key)
    asked: Any = {"model": "policy", "max_tokens": 64, "messages": USER}
    async with api, api.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    assert text == gateway.renderer.decode(gateway.sampler.requests[0].sampled[0])


def test_a_call_that_breaks_after_its_beginning_was_streamed(gateway: Running) -> None:
    """The client has its beginning: the stream still ends properly, and the row is complete."""
    gateway.sampler.script = lambda *_: (
        '<tool_call>\n{"name": "search", "arguments": {"q": "a", "k": oops}}\n</tool_call>'
    )
    claim = gateway.claims[0]
    with claude(gateway, claim) as api:
        events = list(
            api.messages.create(
                model="policy",
                max_tokens=200,
                messages=USER,
                tools=TOOLS,
                stream=True,
            )
        )
    assert events[-1].type == "message_stop"
    begun = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert "tool_use" in begun
    [call] = gateway.store.calls(attempt_ids=[claim.attempt_id])
    assert call.state is CallState.COMPLETED


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
    def ask(failed: bool | None) -> str:
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t"}
        result |= {} if failed is None else {"is_error": failed}
        result |= {} if content is None else {"content": content}
        call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
        messages: Any = [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        with claude(gateway) as api:
            api.messages.create(model="policy", max_tokens=5, messages=messages)
        return gateway.renderer.decode_raw(gateway.sampler.requests[-1].prompt_ids)

    assert f"<tool_response>\n{told}" in ask(True)
    assert "Error" not in ask(False)
    assert "Error" not in ask(None)


@pytest.mark.parametrize(
    "more",
    [{"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, {"container": "c"}],
)
def test_what_would_vanish_is_refused(gateway: Running, more: dict[str, Any]) -> None:
    body = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "h"}]}
    answer = httpx.post(
        f"{gateway.base_url(gateway.claims[0])}/messages",
        json=body | more,
        headers={"x-api-key": gateway.claims[0].key},
    )
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["message"]
