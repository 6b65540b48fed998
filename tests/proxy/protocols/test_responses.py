"""OpenAI's Responses API through the real server with the real client."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import httpx
import openai
import pytest
from gateway_client import wait_until
from official_clients import CALL, client
from scripted_sampler import Running

from agentrl_proxy.protocols import translation
from agentrl_proxy.protocols.responses import responses_request
from agentrl_tracer.schemas import CallState, SkipReason

TOOLS: Any = [
    {
        "type": "function",
        "name": "search",
        "description": "looks things up",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        "strict": False,
    }
]
OTHER = '<tool_call>\n{"name": "search", "arguments": {"q": "bonn"}}\n</tool_call>'


def plain(items: Any) -> list[dict[str, Any]]:
    """Output items without the ids that differ from answer to answer."""
    out = [item.model_dump(exclude_none=True) for item in items]
    for item in out:
        item.pop("id", None)
        item.pop("call_id", None)
    return out


def test_response_is_recorded_token_for_token(gateway: Running) -> None:
    with client(gateway) as api:
        response = api.responses.create(
            model="gpt-5", input="Say you are 7.", instructions="Be brief.", temperature=0.5,
            top_p=0.9, max_output_tokens=99, metadata={"a": "b"}, user="u", store=False,
        )  # fmt: skip
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(gateway.claims[0])
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say you are 7."},
    ]
    assert call.prompt_ids == seen.prompt_ids == gateway.renderer.render(chat)
    assert call.response_ids == seen.sampled[0]
    assert call.response_logprobs == [-0.25 - i / 64 for i in range(len(call.response_ids))]
    assert call.id == call.response_id == response.id
    assert response.id.startswith("resp_")
    assert (seen.params.temperature, seen.params.top_p) == (0.5, 0.9)
    assert seen.params.max_tokens == 99
    assert response.output_text == gateway.renderer.decode(seen.sampled[0])
    assert response.status == "completed"
    assert response.error is None
    assert response.usage is not None
    assert response.usage.input_tokens == len(call.prompt_ids)
    assert response.usage.output_tokens == len(call.response_ids)
    assert response.usage.total_tokens == len(call.prompt_ids) + len(call.response_ids)
    assert (response.instructions, response.metadata, response.max_output_tokens) == (
        "Be brief.", {"a": "b"}, 99,
    )  # fmt: skip
    assert call.request is not None
    assert call.request["input"] == "Say you are 7."
    assert call.response is not None
    assert call.response["id"] == response.id
    assert gateway.store.accounting(gateway.run_id).adds_up


SAID = [
    f"<think>\nhm\n</think>\n\nLet me look. {CALL}\n{OTHER}",
    "Just grüße 👍 text",
    f"{CALL}",
    "<think>\nhm, grüße\n</think>\n\nI am 7.",
]


@pytest.mark.parametrize("said", SAID)
def test_stream_says_what_the_whole_response_says(gateway: Running, said: str) -> None:
    gateway.sampler.script = lambda *_: said
    asked: Any = {"model": "policy", "input": "hi", "tools": TOOLS}
    with client(gateway) as api:
        whole = api.responses.create(**asked)
        events = list(api.responses.create(**asked, stream=True))
        with api.responses.stream(**asked) as stream:
            accumulated = stream.until_done().get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    final = events[-1].response
    assert plain(final.output) == plain(whole.output) == plain(accumulated.output)
    assert final.usage == whole.usage
    ids = [call.response_id for call in gateway.calls(gateway.claims[0])]
    assert ids == [whole.id, final.id, accumulated.id]
    assert events[0].type == "response.created"
    assert events[0].response.id == final.id
    # Each item is added, grows and is done, one after the other.
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(final.output)))
    assert [event.item for event in done] == final.output
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    thought = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    assert ("".join(thought) != "") is ("<think>" in said)
    arguments = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(arguments) == said.count("</tool_call>")
    open_items = set[str]()
    for event in events:
        if event.type == "response.output_item.added":
            open_items = {str(event.item.id)}
        elif event.type == "response.output_item.done":
            open_items.clear()
        elif hasattr(event, "item_id"):
            assert event.item_id in open_items


def test_items(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: SAID[0]
    with client(gateway) as api:
        response = api.responses.create(model="policy", input="hi", tools=TOOLS)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].type == "reasoning"
    assert response.output[0].summary[0].text == "hm"
    assert response.output[2].type == "function_call"
    assert json.loads(response.output[2].arguments) == {"q": "köln", "k": 3}
    assert len({str(item.id) for item in response.output}) == 4
    gateway.sampler.script = lambda *_: ""
    with client(gateway) as api:
        silent = api.responses.create(model="policy", input="hi")
        stream = list(api.responses.create(model="policy", input="hi", stream=True))
    assert silent.output_text == ""
    assert [item.type for item in silent.output] == ["message"]
    assert stream[-1].type == "response.completed"
    assert plain(stream[-1].response.output) == plain(silent.output)


def test_text_arrives_as_it_is_sampled(gateway: Running) -> None:
    gateway.sampler.delay = 0.03
    with client(gateway) as api:
        started = time.monotonic()
        times = [
            time.monotonic() - started
            for event in api.responses.create(model="policy", input="hi", stream=True)
            if event.type == "response.output_text.delta"
        ]
    assert len(times) > 10
    assert times[0] < times[-1] / 2


def test_cut_by_its_limit(gateway: Running) -> None:
    with client(gateway) as api:
        response = api.responses.create(model="policy", input="hi", max_output_tokens=3)
        events = list(
            api.responses.create(model="policy", input="hi", max_output_tokens=3, stream=True)
        )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details == response.incomplete_details


def test_logprobs(gateway: Running) -> None:
    asked: Any = {
        "model": "policy", "input": "hi", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }  # fmt: skip
    with client(gateway) as api:
        response = api.responses.create(**asked)
        events = list(api.responses.create(**asked, stream=True))
    [item] = response.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs is not None
    [first, second] = gateway.calls(gateway.claims[0])
    assert [one.logprob for one in logprobs] == first.response_logprobs[:-1]
    assert len(logprobs[0].top_logprobs) == 2
    streamed = [
        one.logprob for e in events if e.type == "response.output_text.delta" for one in e.logprobs
    ]
    assert streamed == second.response_logprobs[: len(streamed)]
    assert len(streamed) > 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_keeps_its_exact_tokens(gateway: Running, stream: bool) -> None:
    turns = [
        f"Let me look.\n{CALL}\n{OTHER}", CALL, "It is 7.", f"Again:\n\n{OTHER}",
        '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"q": [1, 2.50, null, {"a": "<b>"}]}}'
        "\n</tool_call>",
    ] * 2  # fmt: skip
    said = iter(turns)
    gateway.sampler.script = lambda *_: next(said)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Find 7."}]}]
    with client(gateway) as api:
        for turn in range(len(turns)):
            asked: Any = {
                "model": "policy", "input": items, "tools": TOOLS, "instructions": "s",
            }  # fmt: skip
            if stream:
                with api.responses.stream(**asked) as made:
                    response = made.until_done().get_final_response()
            else:
                response = api.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": f"got {turn}"}
                for item in response.output
                if item.type == "function_call"
            ]
            items += results or [{"role": "user", "content": f"go on {turn}"}]
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == 12
    for before, after in itertools.pairwise(calls):
        known = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(known)] == known
    assert gateway.stats["continued"] == 11


def test_fields_that_become_those_of_a_chat(gateway: Running) -> None:
    asyncio.run(translation.load())
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    body = {
        "model": "m",
        "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "search"},
        "text": {"format": {"type": "json_schema", **schema}},
    }
    chat = responses_request(body)
    made = [(message["role"], message.get("content")) for message in chat.messages]
    assert made[0] == ("developer", "d")
    assert [role for role, _ in made] == ["developer", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert [content for role, content in made if role == "tool"] == ["one", "two"]
    assert chat.tools is not None
    assert chat.tools[0]["function"]["parameters"] == TOOLS[0]["parameters"]
    assert chat.raw == body


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, agentrl_proxy.app\n"
        "print(*(m for m in ('litellm', 'torch', 'transformers', 'openai') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aa"}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"model": 3}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input[0].call_id",
        ),
        ({"input": "word " * 3000}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"instructions": 3}, "instructions"),
        ({"temperature": 9}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_bad_fields_are_named(gateway: Running, more: dict[str, Any], field: str) -> None:
    body = {"model": "policy", "input": "x"} | more
    with client(gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.post("/responses", body=body, cast_to=httpx.Response)
    assert caught.value.param == field
    assert gateway.calls(gateway.claims[0]) == []


@pytest.mark.parametrize("stream", [False, True])
def test_refusals(gateway: Running, stream: bool) -> None:
    asked: Any = {"model": "policy", "input": "x", "stream": stream}
    api = client(gateway, api_key="sk-agentrl-wrong")
    with api, pytest.raises(openai.AuthenticationError):
        api.responses.create(**asked)
    api = client(gateway, api_key=gateway.claims[1].key)
    with api, pytest.raises(openai.PermissionDeniedError):
        api.responses.create(**asked)
    gateway.sampler.fail_after = 0
    with client(gateway) as api:
        with pytest.raises(openai.InternalServerError) as broken:
            api.responses.create(**asked)
        assert broken.value.status_code == 503
        gateway.seal(gateway.claims[0])
        with pytest.raises(openai.ConflictError):
            api.responses.create(**asked)


def test_an_error_in_mid_stream(gateway: Running) -> None:
    gateway.sampler.fail_after = 4
    with client(gateway) as api:
        events = list(api.responses.create(model="policy", input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None
    assert "the engine fell over" in events[-1].response.error.message
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.ERROR
    assert len(call.response_ids) == 4


def test_a_client_that_leaves_cancels_the_sampling(gateway: Running) -> None:
    gateway.sampler.delay = 0.02
    gateway.sampler.script = lambda *_: "word " * 200
    with client(gateway) as api:
        stream = api.responses.create(model="policy", input="x", stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        wait_until(lambda: gateway.sampler.requests[0].cancelled)
    wait_until(lambda: gateway.calls(gateway.claims[0])[0].ended_at)
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.CANCELLED
    assert call.skip_reason is SkipReason.CLIENT_DISCONNECTED
    sampled = gateway.sampler.requests[0].sampled[0]
    assert 0 < len(call.response_ids) < 200
    assert call.response_ids == sampled[: len(call.response_ids)]


def test_a_marked_retry_is_replayed(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: SAID[0]
    marked = {"x-stainless-retry-count": "1"}
    asked: Any = {"model": "policy", "input": "x", "tools": TOOLS}
    with client(gateway) as api:
        first = api.responses.create(**asked)
        again = api.responses.create(**asked, extra_headers=marked)
        made = [
            list(api.responses.create(**asked, stream=True, extra_headers=marked))[-1]
            for _ in range(2)
        ]
    assert again == first
    assert made[0].response == made[1].response
    assert len(gateway.sampler.requests) == 2  # one whole, one streamed


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_what_was_done(gateway: Running, stream: bool) -> None:
    """Nothing is stored, nothing is truncated, and no built-in tool is called too often."""
    asked: Any = {"model": "policy", "input": "h", "max_tool_calls": 3}
    asked |= {"store": True, "truncation": "auto"}
    with client(gateway) as api:
        if stream:
            with api.responses.stream(**asked) as events:
                answer: Any = events.get_final_response()
        else:
            answer = api.responses.create(**asked)
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(model="policy", input="word " * 3000, truncation="auto")
    assert (answer.store, answer.truncation, answer.max_tool_calls) == (False, "disabled", 3)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "more", [{"max_tool_calls": "x"}, {"max_tool_calls": True}, {"truncation": 1}, {"store": "x"}]
)
def test_what_is_not_done_is_checked_all_the_same(gateway: Running, more: Any) -> None:
    with client(gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.post(
            "/responses", body={"model": "policy", "input": "h"} | more, cast_to=httpx.Response
        )
    assert caught.value.param == next(iter(more))
