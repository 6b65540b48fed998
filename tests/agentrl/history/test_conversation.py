"""Calls read as messages, whichever protocol the agent used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.history.rollout import conversation
from agentrl.history.rollout.conversation import Message, ToolCall, answered, asked
from agentrl.runs.excerpts import excerpt

_USER = Message("user", "What is 6 * 7?")
_USES = Message("assistant", "", tools=(ToolCall("multiply", '{"a": 6}'),))
_THINKS = Message("assistant", "Let me use a tool.", "Six times seven.")


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is 6 * 7?"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "t", "function": {"name": "multiply", "arguments": '{"a": 6}'}}]},
            {"role": "tool", "tool_call_id": "t", "content": "42"},
        ]},
        {"instructions": "Be brief.", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is 6 * 7?"}]},
            {"type": "function_call", "call_id": "t", "name": "multiply", "arguments": '{"a": 6}'},
            {"type": "function_call_output", "call_id": "t", "output": "42"},
        ]},
        {"system": [{"type": "text", "text": "Be brief."}], "messages": [
            {"role": "user", "content": "What is 6 * 7?"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t", "name": "multiply", "input": {"a": 6}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "42"}]},
        ]},
    ],
    ids=["chat", "responses", "anthropic"],
)  # fmt: skip
def test_three_protocols_give_the_same_messages(request_body: dict[str, Any]) -> None:
    said = [Message("system", "Be brief."), _USER, _USES, Message("tool", "42", call="t")]
    assert asked(request_body) == said


@pytest.mark.parametrize(
    ("request_body", "line"),
    [
        ({"messages": [{}, {"role": "user", "content": "hi\n"}]}, "(1 earlier) user: hi"),
        ({"messages": [{"role": "user", "tool_calls": 3, "content": {"a": 1}}]}, 'user: {"a": 1}'),
        ({"input": "hi"}, "user: hi"),
        ({"input": [{"type": "search", "query": "cats"}]}, 'search: {"type": "search", "query": '
                                                           '"cats"}'),
        ({"prompt": ["a", 2]}, "user: a 2"),
        (None, ""),
    ],
)  # fmt: skip
def test_odd_requests_are_read_too(request_body: Any, line: str) -> None:
    assert conversation.prompt_excerpt(request_body) == line


def test_an_answer_keeps_its_reasoning_apart() -> None:
    tool = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    for message, answer in (
        ({"content": _THINKS.text, "reasoning_content": _THINKS.reasoning}, _THINKS),
        ({"content": f"<think>\n{_THINKS.reasoning}\n</think>\n{_THINKS.text}"}, _THINKS),
        ({"tool_calls": [tool]}, Message("assistant", "", tools=(ToolCall("add", '{"a": 1}'),))),
    ):
        assert answered({"choices": [{"message": {"role": "assistant", **message}}]}) == answer
    assert answered({"choices": [{"text": " upon a time"}]}) == Message("assistant", " upon a time")
    assert answered(None) is None
    said = {"choices": [{"message": {"content": "so\n", "tool_calls": [tool]}}]}
    assert conversation.answer_excerpt(said) == 'so → add({"a": 1})'
    assert len(excerpt("a \n b" * 100)) == 240


def test_what_an_earlier_call_showed_is_counted_even_without_its_reasoning() -> None:
    earlier = [[Message("user", "Other")], [_USER, _THINKS]]
    later = [_USER, replace(_THINKS, reasoning=""), Message("user", "And 7 * 7?")]
    assert conversation.shown_before(later, earlier) == 2
    assert conversation.shown_before(later, []) == 0
    said = [{"role": role, "content": role} for role in ("system", "assistant", "tool", "user")]
    assert conversation.new_text({"messages": said}) == "tool\nuser"
