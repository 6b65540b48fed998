"""Requests and responses of every protocol in one line."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.runs.excerpts import answer_excerpt, excerpt, prompt_excerpt

TOOL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "user: hi"),
        ({"messages": [{}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
         "(1 before) user: hi"),
        ({"input": "hi"}, "hi"),
        ({"input": [{"type": "function_call_output", "output": "42"}]}, "function_call_output: 42"),
        ({"prompt": ["a", "b"]}, "b"),
        ({"prompt": [1, 2]}, "2"),
        (None, ""),
    ],
)  # fmt: skip
def test_prompts(request_: dict[str, Any] | None, expected: str) -> None:
    assert prompt_excerpt(request_) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"choices": [{"message": {"content": "hello"}}]}, "hello"),
        ({"choices": [{"message": {"content": None, "tool_calls": [TOOL]}}]}, '→ add({"a": 1})'),
        ({"choices": [{"text": "hello"}]}, "hello"),
        ({"content": [{"type": "tool_use", "name": "add", "input": {"a": 1}}]}, '→ add({"a": 1})'),
        ({"output": [{"content": [{"type": "output_text", "text": "hello"}]}]}, "hello"),
    ],
)
def test_answers(response: dict[str, Any], expected: str) -> None:
    assert answer_excerpt(response) == expected


def test_long_texts_are_cut() -> None:
    assert excerpt("a \n b" * 100).endswith("…")
    assert len(excerpt("a \n b" * 100)) == 240
