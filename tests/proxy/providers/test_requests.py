"""Providers' models in every protocol: a second gateway is the provider, official SDKs ask."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from gateway_client import BODIES, wait_until
from official_clients import CALL, USER, claude
from provider_servers import (
    SECRET,
    answerer,
    asking,
    assert_no_key,
    only_call,
    post_to,
    recorded,
    said,
    streaming,
    trouble,
)
from running_gateway import serving
from scripted_sampler import Running
from speakers import CLAUDE_TOOL, SPEAKERS

from agentrl_proxy.app import create_app
from agentrl_proxy.dependencies import ProviderModel
from agentrl_tracer.schemas import Call, CallState, SkipReason

PICTURE = "data:image/png;base64,iVBORw0KGgo="
# Each protocol once, and both kinds of answer.
WHOLE_OR_STREAMED = [
    ("chat/completions", True), ("responses", False), ("messages", True), ("completions", False),
    ("completions", True),
]  # fmt: skip


def total(call: Call) -> int:
    return call.params["usage"]["total_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "upstream"),
    [*((path, "openai") for path in SPEAKERS), ("messages", "anthropic")],
)
def test_a_conversation_with_tools(
    start: Any, provider: Running, path: str, upstream: str, stream: bool
) -> None:
    """A tool called twice at once, and its results, by two kinds of provider."""
    base = provider.url if upstream == "anthropic" else f"{provider.url}/v1"
    other = ProviderModel(f"{upstream}/policy", base, SECRET, num_retries=0, timeout=60)
    gateway: Running = start(provider_models={"policy": other})
    speak, turns = partial(SPEAKERS[path], gateway, gateway.claims[0]), [*USER]
    provider.sampler.script = lambda *_: (
        f"<think>\nlet me see\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
    )
    first = speak(turns, stream)
    assert (first.text.strip(), first.reason) == ("Let me look.", "tool_calls")
    assert first.calls == [("search", {"q": "köln", "k": 3})] * 2
    assert first.thought == "let me see"
    provider.sampler.script = lambda *_: "It is there."
    second = speak([*turns, *first.turn], stream)
    assert (second.text, second.reason) == ("It is there.", "stop")
    asked = provider.sampler.requests
    prompt = provider.renderer.decode_raw(asked[1].prompt_ids)
    assert prompt.startswith("<|im_start|>system\ns")
    assert prompt.count("found") == 2
    for call, answer, one in zip(recorded(gateway, 2), (first, second), asked, strict=True):
        assert call.id == answer.id
        counted = answer.usage.model_dump().values()
        assert len(one.prompt_ids) in counted
        assert len(one.sampled[0]) in counted
        assert total(call) == len(one.prompt_ids) + len(one.sampled[0])
        assert call.request is not None
        assert call.request["model"] == "policy"
    assert_no_key(gateway)


def test_fields_reach_the_provider(gateway: Running, provider: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    post_to(gateway, "responses", max_output_tokens=98, text={"format": format})
    post_to(gateway, "messages", max_tokens=97, stop_sequences=["END"])
    first, second = [request.params for request in provider.sampler.requests]
    assert (first.max_tokens, second.max_tokens, second.stop) == (98, 97, ("END",))
    assert first.grammar  # a schema is the provider's to enforce
    assert [call.params["max_tokens"] for call in recorded(gateway, 2)] == [98, 97]


@pytest.mark.parametrize("stream", [False, True])
def test_signed_thinking_goes_there_and_back(start: Any, faulty: Any, stream: bool) -> None:
    """Anthropic's API refuses a tool's result whose turn lacks the thinking as it was signed."""
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "Hm. Well.", "signature": "c2lnbmVk"},
        {"type": "thinking", "thinking": "So be it.", "signature": "YWdhaW4="},
        {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"q": "x"}},
    ]
    usage = {"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 3,
             "cache_creation_input_tokens": 0}  # fmt: skip
    ended = {"stop_reason": "tool_use", "stop_sequence": None}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x",
             **ended, "content": blocks, "usage": usage}  # fmt: skip
    events: list[Any] = [{"type": "message_start", "message": {**whole, "content": []}}]
    for i, (begun, *pieces) in enumerate(
        [
            *([{"type": "thinking", "thinking": "", "signature": ""},
               {"type": "thinking_delta", "thinking": block["thinking"][:4]},
               {"type": "thinking_delta", "thinking": block["thinking"][4:]},
               {"type": "signature_delta", "signature": block["signature"]}]
              for block in blocks[:2]),
            [{**blocks[2], "input": {}},
             *({"type": "input_json_delta", "partial_json": part} for part in ('{"q":', ' "x"}'))],
        ]
    ):  # fmt: skip
        events += [
            {"type": "content_block_start", "index": i, "content_block": begun},
            *({"type": "content_block_delta", "index": i, "delta": piece} for piece in pieces),
            {"type": "content_block_stop", "index": i},
        ]
    events += [{"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
    lines = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    upstream = faulty((200, lines.encode() if stream else whole))
    other = ProviderModel(
        "anthropic/claude-sonnet-4-5", upstream.url.removesuffix("/v1"), SECRET, num_retries=0
    )
    gateway: Running = start(provider_models={"answerer": other})
    messages: list[Any] = [{"role": "user", "content": "?"}]
    with claude(gateway) as api:
        settings: Any = {"model": "answerer", "max_tokens": 2000, "tools": [CLAUDE_TOOL],
                         "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
        for _ in range(2):
            if stream:
                with api.messages.stream(messages=messages, **settings) as made:
                    answer = made.get_final_message()
            else:
                answer = api.messages.create(messages=messages, **settings)
            *thoughts, use = answer.content
            assert [thought.model_dump() for thought in thoughts] == blocks[:2]
            assert (use.type, use.input) == ("tool_use", {"q": "x"})
            counted = answer.usage
            assert (counted.input_tokens, counted.cache_read_input_tokens) == (7, 3)
            content = [block.model_dump() for block in answer.content]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "yes"}
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
    sent = [one["body"] for one in upstream.seen]
    assert [body["thinking"]["budget_tokens"] for body in sent] == [1024, 1024]
    [back] = [m for m in sent[1]["messages"] if m["role"] == "assistant"]
    assert back["content"][:2] == blocks[:2]
    for call in recorded(gateway, 2):
        assert call.response is not None
        assert total(call) == 15
        message = call.response["choices"][0]["message"]
        assert message["thinking_blocks"] == blocks[:2]
        assert message["reasoning_content"] == "Hm. Well.So be it."


def test_a_count_asks_no_provider(start: Any, faulty: Any) -> None:
    upstream = faulty((500, {}))
    others = {name: ProviderModel(name, upstream.url, SECRET)
              for name in ("openai/x", "anthropic/claude-opus-4-6")}  # fmt: skip
    gateway: Running = start(provider_models=others)
    with claude(gateway) as api:
        for model, words in itertools.product(others, (1, 500)):
            messages: Any = [{"role": "user", "content": "word " * words}]
            made = api.messages.count_tokens(model=model, system="Be brief.", messages=messages)
            assert 0.9 * words < made.input_tokens < 1.2 * words + 40
    assert recorded(gateway, 0) == upstream.seen == []


def test_effort_is_handed_on(start: Any, faulty: Any) -> None:
    upstream = faulty((500, trouble("what it was asked is enough")))
    base = upstream.url.removesuffix("/v1")
    names = ["openai/x", "anthropic/claude-opus-4-6", "anthropic/claude-opus-4-5"]
    models = {name: ProviderModel(name, base, SECRET, num_retries=0) for name in names}
    gateway: Running = start(provider_models=models)
    for model, thinking, told in (
        ("openai/x", None, {"reasoning_effort": "low"}),
        ("openai/x", {"type": "adaptive"}, {"reasoning_effort": "low"}),
        ("openai/x", {"type": "enabled", "budget_tokens": 9000}, {"reasoning_effort": "low"}),
        ("openai/x", {"type": "disabled"}, {"reasoning_effort": "none"}),
        (names[1], None, {"output_config": {"effort": "low"}}),
        (names[1], {"type": "adaptive"}, {"output_config": {"effort": "low"}}),
        (
            names[2],
            {"type": "enabled", "budget_tokens": 1024},
            {"output_config": {"effort": "low"}},
        ),
    ):
        more = {"max_tokens": 2000, "thinking": thinking}
        wrong = post_to(gateway, "messages", model, output_config={"effort": 3}, **more)
        assert wrong.status_code == 400
        upstream.seen.clear()
        post_to(gateway, "messages", model, output_config={"effort": "low"}, **more)
        [sent] = [one["body"] for one in upstream.seen]
        fields = ("reasoning_effort", "output_config")
        assert {k: sent[k] for k in fields if k in sent} == told, (model, thinking)


# --- what is the provider's to judge, and what goes wrong


def test_pictures_reach_a_model_that_may_see(start: Any, faulty: Any) -> None:
    upstream = faulty((200, said("a cat")))
    gateway = asking(start, upstream)
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    shown = [
        ("responses", "input", {"type": "input_image", "image_url": PICTURE, "detail": "auto"}),
        ("messages", "messages", {"type": "image", "source": source}),
    ]
    for protocol, field, part in shown:
        for model, status in (("answerer", 200), ("policy", 400)):
            more = {field: [{"role": "user", "content": [part]}]}
            assert post_to(gateway, protocol, model, **more).status_code == status
    for one in upstream.seen:
        [message] = one["body"]["messages"]
        [seen] = message["content"]
        assert seen["image_url"]["url"] == PICTURE
    assert len(upstream.seen) == 2


def test_large_pictures_pass_whole(start: Any, faulty: Any) -> None:
    """They count against the body's limit, not against what our own model would read."""
    upstream = faulty((200, said("a cat")))
    gateway = asking(start, upstream)
    picture = f"data:image/png;base64,{'iVBORw0KGgo' * 300_000}="
    shown = [{"type": "image_url", "image_url": {"url": picture}}] * 2
    assert post_to(gateway, messages=[{"role": "user", "content": shown}]).status_code == 200
    [seen] = upstream.seen
    assert seen["body"]["messages"] == [{"role": "user", "content": shown}]
    [call] = recorded(gateway, 1)
    assert call.request is not None
    assert call.request["messages"][0]["content"] == shown
    assert post_to(gateway, messages=[{"role": "user", "content": shown * 2}]).status_code == 413
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(("protocol", "stream"), [("chat/completions", True), ("messages", False)])
def test_retries_and_fallbacks_are_the_routers(
    start: Any, faulty: Any, provider: Running, protocol: str, stream: bool
) -> None:
    upstream = faulty((500, trouble("a bad day")))
    others = {
        "answerer": ProviderModel(
            "openai/x", upstream.url, SECRET, num_retries=1, fallbacks=("b",)
        ),
        "b": answerer(provider),
    }
    gateway: Running = start(provider_models=others)
    response = post_to(gateway, protocol, stream=stream)
    assert response.status_code == 200
    assert len(upstream.seen) == 2
    assert len(provider.sampler.requests) == 1
    [call] = recorded(gateway, 1)
    assert (call.model, call.params["provider_model"]) == ("answerer", "policy")
    assert call.params["fallbacks"] == 1


@pytest.mark.parametrize(("protocol", "stream"), WHOLE_OR_STREAMED)
def test_a_refusal_is_said_in_the_clients_protocol(
    start: Any, faulty: Any, protocol: str, stream: bool
) -> None:
    upstream = faulty((429, trouble(f"slow down, {SECRET}")))
    gateway = asking(start, upstream)
    response = post_to(gateway, protocol, stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    error = response.json()["error"]
    assert error["type"] == ("rate_limit_error")
    assert "slow down, [key]" in error["message"]
    if protocol == "messages":
        assert response.json()["type"] == "error"
    call = only_call(gateway)
    assert (call.state, call.params["error_status"]) == (CallState.ERROR, 429)
    assert_no_key(gateway, response.text, call.error or "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", BODIES)
async def test_a_client_that_leaves_cancels_the_call(
    gateway: Running, provider: Running, protocol: str, stream: bool
) -> None:
    provider.sampler.delay = 0.1
    claim, path, body = gateway.claims[0], f"/{protocol}", BODIES[protocol]
    headers = {"authorization": f"Bearer {claim.key}"}
    async with httpx.AsyncClient(base_url=gateway.base_url(claim), headers=headers) as api:
        body = {"model": "answerer", "stream": stream, **body}
        if stream:
            async with api.stream("POST", path, json=body, timeout=60) as response:
                await anext(response.aiter_lines())
        else:
            asking = asyncio.create_task(api.post(path, json=body, timeout=60))
            await asyncio.to_thread(
                wait_until, lambda: gateway.calls(claim) and provider.sampler.requests
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    for _ in range(500):
        calls = gateway.calls(claim)
        if provider.sampler.requests[-1].cancelled and calls and calls[-1].ended_at:
            break
        await asyncio.sleep(0.02)
    assert provider.sampler.requests[-1].cancelled
    call = gateway.calls(claim)[-1]
    assert (call.state, call.skip_reason) == (CallState.CANCELLED, SkipReason.NOT_TRAINABLE_MODEL)
    assert (call.response is not None) is stream  # the part that had come
    assert call.params["usage_unknown"] == "the answer did not come to its end"
    wait_until(lambda: gateway.stats["in_flight"] == 0)
    assert gateway.store.accounting(gateway.run_id).adds_up


# --- budgets


@pytest.mark.parametrize(("protocol", "stream"), [("chat/completions", True), ("messages", False)])
def test_tokens_of_providers_models_count(
    start: Any, provider: Running, protocol: str, stream: bool
) -> None:
    """Until the budget is used up, in this process and, by the store, in the next."""
    gateway: Running = start(
        provider_models={"answerer": answerer(provider)}, max_tokens_per_rollout=100
    )
    claim = gateway.claims[0]
    answers = [post_to(gateway, protocol, stream=stream) for _ in range(8)]
    good = [answer for answer in answers if answer.is_success]
    assert 0 < len(good) < 8
    calls = recorded(gateway, len(good))
    used = [total(call) for call in calls]
    asked = provider.sampler.requests
    assert used == [len(one.prompt_ids) + len(one.sampled[0]) for one in asked]
    assert sum(used[:-1]) < 100 <= sum(used)
    assert gateway.store.spent(claim.attempt_id) == (len(calls), sum(used))
    refused = answers[-1]
    assert refused.status_code == 429
    assert f"used {sum(used)} of its 100 tokens" in refused.json()["error"]["message"]
    assert post_to(gateway, protocol, "policy", stream=stream).status_code == 429
    with serving(create_app(gateway.deps)) as url:  # it remembers nothing
        assert post_to(replace(gateway, url=url), protocol, stream=stream).status_code == 429
    assert len(provider.sampler.requests) == len(calls)


@pytest.mark.parametrize("stream", [False, True])
def test_no_usage_is_made_up(start: Any, faulty: Any, stream: bool) -> None:
    """LiteLLM estimates what it is not told; a record, a budget and an answer have no estimates."""
    whole = {k: v for k, v in said("fine").items() if k != "usage"}
    pieces = streaming({"delta": {"content": "fi"}}, {"delta": {"content": "ne"}})
    upstream = faulty((200, pieces if stream else whole))
    gateway = asking(start, upstream, deps={"max_tokens_per_rollout": 100})
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    chat, response = (post_to(gateway, path, **more) for path in ("chat/completions", "responses"))
    assert ('"usage"' in chat.text) is not stream
    assert '"usage":{' not in chat.text
    assert '"usage":null' in response.text
    assert post_to(gateway, "messages", stream=stream).is_success
    for call in recorded(gateway, 3):
        assert "usage" not in call.params
        assert call.params["usage_unknown"] == "the provider did not tell it"
        assert call.response is not None
        assert call.response["choices"][0]["message"]["content"] == "fine"
    assert gateway.store.spent(gateway.claims[0].attempt_id) == (3, 0)
