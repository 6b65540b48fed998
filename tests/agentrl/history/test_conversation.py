"""Calls read as messages, whichever protocol the agent used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.history.rollout.conversation import (
    Message,
    ToolCall,
    answer_excerpt,
    answered,
    asked,
    new_text,
    prompt_excerpt,
    shown_before,
)
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


def test_a_completion_has_one_message_and_odd_bodies_are_shown_as_json() -> None:
    assert asked({"prompt": "Once"}) == [Message("user", "Once")]
    assert asked({"input": [{"type": "web_search_call", "query": "cats"}]})[0].text == (
        '{"type": "web_search_call", "query": "cats"}'
    )
    assert asked({"messages": [{"role": "user", "tool_calls": 3, "content": {"a": 1}}]}) == [
        Message("user", '{"a": 1}')
    ]
    assert asked(None) == []


def test_an_answer_keeps_its_reasoning_apart() -> None:
    for message in (
        {"content": _THINKS.text, "reasoning_content": _THINKS.reasoning},
        {"content": f"<think>\n{_THINKS.reasoning}\n</think>\n{_THINKS.text}"},
    ):
        response = {"choices": [{"message": {"role": "assistant", **message}}]}
        assert answered(response) == _THINKS
    completed = {"choices": [{"text": " upon a time"}]}
    assert answered(completed) == Message("assistant", " upon a time")
    assert answered(None) is None


def test_messages_that_an_earlier_call_showed_are_counted_even_without_their_reasoning() -> None:
    earlier = [[Message("user", "Other")], [_USER, _THINKS]]
    later = [_USER, replace(_THINKS, reasoning=""), Message("user", "And 7 * 7?")]
    assert shown_before(later, earlier) == 2
    assert shown_before(later, []) == 0


@pytest.mark.parametrize(
    ("request_body", "line"),
    [
        ({"messages": [{}, {"role": "user", "content": "hi\n"}]}, "(1 before) user: hi"),
        ({"input": "hi"}, "user: hi"),
        ({"input": [{"type": "function_call_output", "output": "42"}]}, "tool: 42"),
        ({"prompt": ["a", "b"]}, "user: a b"),
        ({"prompt": [1, 2]}, "user: 1 2"),
        (None, ""),
    ],
)
def test_a_request_in_one_line_is_its_last_message(request_body: Any, line: str) -> None:
    assert prompt_excerpt(request_body) == line


def test_answers_in_one_line_and_what_is_new_in_a_request() -> None:
    tool = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"content": None, "tool_calls": [tool]}
    assert answer_excerpt({"choices": [{"message": message}]}) == '→ add({"a": 1})'
    assert answer_excerpt({"choices": [{"message": {"content": "hello"}}]}) == "hello"
    said = [{"role": role, "content": role} for role in ("system", "assistant", "tool", "user")]
    assert new_text({"messages": said}) == "tool\nuser"
    assert new_text({"messages": said[:1]}) == "system"
    assert len(excerpt("a \n b" * 100)) == 240
