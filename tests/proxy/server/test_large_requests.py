"""Large requests wait for each other, the event loop and the others' requests for none of them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gateway_client import post
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.dependencies import MAX_BODY_BYTES
from agentrl_proxy.protocols.chat import MAX_ARGUMENTS, MAX_MESSAGES, MAX_TOOLS
from agentrl_proxy.protocols.fields import MAX_MARKS
from agentrl_proxy.server.large_requests import LargeRequests, is_large

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Say 7."}]}
LONG = [{"role": "user", "content": "So it goes. " * 8000}]


def chat(gateway: Running, path: str = "chat/completions", **more: Any) -> Any:
    return post(f"{gateway.base_url()}/{path}", OPERATOR_KEY, {**CHAT, **more})


def test_what_is_large() -> None:
    small = json.dumps({**CHAT, "tools": [{"function": {"name": "f"}}] * 20}).encode()
    assert not is_large(small)
    assert is_large(json.dumps({**CHAT, "messages": LONG}).encode())
    assert is_large(json.dumps({**CHAT, "messages": CHAT["messages"] * 200}).encode())


async def test_one_at_a_time_in_a_thread_of_their_own() -> None:
    large, here = LargeRequests(), threading.get_ident()
    assert await large.run(False, threading.get_ident) == here
    there = {await large.run(True, threading.get_ident) for _ in range(3)}
    assert len(there) == 1
    assert here not in there


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": LONG}),
        ("completions", {"prompt": LONG[0]["content"]}),
        ("responses", {"input": LONG[0]["content"]}),
        ("messages", {"messages": LONG, "max_tokens": 4}),
        ("messages/count_tokens", {"messages": LONG}),
    ],
)
def test_others_are_answered_meanwhile(start: Any, path: str, body: dict[str, Any]) -> None:
    gateway: Running = start(context_length=2048)
    thread = gateway.app.state.gateway.large._thread
    release = threading.Event()
    thread.submit(release.wait)
    with ThreadPoolExecutor(1) as client:
        held = client.submit(chat, gateway, path, **body)
        try:
            assert chat(gateway).status_code == 200
            assert not held.done()
        finally:
            release.set()
        answer = held.result()
    if path.endswith("count_tokens"):
        assert answer.json()["input_tokens"] > 2048
        return
    assert answer.status_code == 400
    assert "at least" in answer.text
    assert "2048 tokens" in answer.text


SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "a" * 2**20 + "b"}}


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({"messages": CHAT["messages"] * (MAX_MESSAGES + 1)}, 400, f"list of up to {MAX_MESSAGES}"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, 400, f"list of up to {MAX_TOOLS}"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            400,
            f"tool_calls[0].function.arguments must be a string of up to {MAX_ARGUMENTS}",
        ),
        ({"junk": "j" * 100_000}, 413, "leave out what the model does not read"),
        ({"junk": "j" * 70_000, "n": 128}, 413, "fewer choices"),
        ({"junk": "j" * MAX_BODY_BYTES}, 413, f"larger than {MAX_BODY_BYTES} bytes"),
        ({"junk": [0] * MAX_MARKS}, 413, "too many values"),
        ({"junk": {f"{i}": 0 for i in range(MAX_MARKS // 3)}}, 413, "too many values"),
    ],
    ids=["messages", "tools", "arguments", "unread", "choices", "bytes", "numbers", "keys"],
)
def test_what_is_bounded(gateway: Running, more: dict[str, Any], status: int, said: str) -> None:
    answer = chat(gateway, **more)
    assert answer.status_code == status
    assert said in answer.text
    assert gateway.sampler.requests == []


def test_a_long_prompt_that_fits_keeps_its_tokens(start: Any) -> None:
    gateway: Running = start(context_length=200_000)
    assert chat(gateway, messages=LONG).status_code == 200
    asked = gateway.sampler.requests[0].prompt_ids
    text = gateway.renderer.text(LONG, None)
    backend = gateway.renderer.tokenizer.backend_tokenizer
    assert list(asked) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("value", [[1] * 10**6, {"a": "b" * 10**6}, "c" * 10**6])
def test_an_error_shows_the_beginning_of_a_value(gateway: Running, value: Any) -> None:
    answer = chat(gateway, temperature=value)
    assert answer.status_code in (400, 413)
    assert len(answer.text) < 400
