"""Tool calls, thoughts and plain text in chat completions, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from official_clients import CALL, TOOLS, USER, client, streamed
from scripted_sampler import Running

from agentrl_proxy.protocols.chat import chat_request


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "search", "arguments": {q: "x"}}\n</tool_call>',
        'So: <tool_call>{"name": "search"',
        '<tool_call>{"name": "search", "arguments": {"q": "Berlin"}}, oops</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"q": "Berlin", "n": }}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"q": "Ber',
        "<tool_call>[1]</tool_call> and so on",
        "a < b <tool",
        "<think>hm",
    ],
)
def test_malformed_tool_calls_are_text(gateway: Running, text: str) -> None:
    gateway.sampler.script = lambda *_: text
    asked: Any = {"model": "policy", "messages": USER, "tools": TOOLS}
    with client(gateway) as api:
        whole = api.chat.completions.create(**asked)
        got, calls, finish, _ = streamed(api.chat.completions.create(**asked, stream=True))
    message = whole.choices[0].message
    assert not message.tool_calls
    assert not calls
    assert message.content == got
    assert finish == whole.choices[0].finish_reason == "stop"
    if "<think>" in text:
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    else:
        assert got == text


def test_without_tools_a_call_is_text(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: CALL
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER)
        asked: Any = {"model": "policy", "messages": USER, "tools": TOOLS, "tool_choice": "none"}
        none = api.chat.completions.create(**asked)
    assert answer.choices[0].message.content == none.choices[0].message.content == CALL


def test_streamed_calls_have_indices_and_ids(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: f"Let me look.\n{CALL}\n{CALL}"
    with client(gateway) as api:
        made = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS, stream=True)
        _, calls, finish, _ = streamed(made)
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert finish == "tool_calls"


def test_a_tiny_temperature_is_greedy() -> None:
    """Logits that are divided by it may overflow."""
    said = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    for given, sampled in ((1e-40, 0.0), (0.0099, 0.0), (0.01, 0.01), (1, 1.0)):
        assert chat_request(said | {"temperature": given}).sampling["temperature"] == sampled
