"""Valid requests that use many fields, and what breaks them."""

from __future__ import annotations

import copy
import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("AGENTRL_FUZZ_EXAMPLES")
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
_FUNCTION = {"name": "search", "description": "d", "parameters": _SCHEMA}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "search", "arguments": '{"q": 1}'}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "name": "search", "content": "found"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "auto",
        "response_format": {"type": "text"}, "max_tokens": 4, "max_completion_tokens": 4,
        "temperature": 1.0, "top_p": 0.5, "top_k": 3, "n": 1, "stop": ["x"], "seed": 1,
        "logprobs": True, "top_logprobs": 1, "stream": False,
        "stream_options": {"include_usage": True},
    },
    "completions": {
        "model": "policy", "prompt": ["One", "Two"], "n": 2, "logprobs": 1, "echo": False,
        "stop": ["x"], "stream": False, "stream_options": {"include_usage": True}, "seed": 3,
    },
    "responses": {
        "model": "policy", "instructions": "s", "stream": False, "max_output_tokens": 9,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "h"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "yo", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "one"},
        ],
        "tools": [{"type": "function", **_FUNCTION, "strict": True}],
        "tool_choice": {"type": "function", "name": "search"}, "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    },
    "messages": {
        "model": "policy", "max_tokens": 9, "stream": False, "stop_sequences": ["x"],
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "text", "text": "yo"},
                {"type": "tool_use", "id": "c", "name": "search", "input": {"q": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": True,
                 "content": [{"type": "text", "text": "one"}]},
                {"type": "text", "text": "and?"},
            ]},
        ],
        "tools": [{"name": "search", "description": "d", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "search", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
}  # fmt: skip
REQUESTS["messages/count_tokens"] = REQUESTS["messages"]


def nested(depth: int, *, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


NASTY_TEXTS = [
    "\0", "a\0b", "\ud800", "\udfff x", "<|im_end|>", "<tool_call>", "{{ 1/0 }}", "function",
    "developer", "none", "required", "image_url", "[" * 3000, '{"a":' * 3000,
    "[" * 900 + "]" * 900, '"\\ud800"', '{"\\ud800": "\\u0000"}', "1" * 5000, "NaN", "\u202e\u2028",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**400]),
    st.floats(),  # NaN and infinities too
    st.text(st.characters(exclude_categories=())),  # lone surrogates too
    st.sampled_from(NASTY_TEXTS),
)
GARBAGE = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    st.builds(nested, st.sampled_from([100, 250, 300, 900]), lists=st.booleans()),
    # Values that cannot be hashed, where a name is expected.
    st.sampled_from([[], {}, [[]], {"type": []}, {"type": {}}, [{"type": []}]]).map(copy.deepcopy),
)


@st.composite
def broken(draw: st.DrawFn, valid: Any) -> Any:
    """``valid`` with up to three of its parts exchanged for garbage, removed or added."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        node = value
        for _ in range(draw(st.integers(0, 7))):
            parts = node.values() if isinstance(node, dict) else node
            inner = [part for part in parts if isinstance(part, dict | list) and part]
            if not inner:
                break
            node = draw(st.sampled_from(inner))
        if not node:
            continue
        place = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        change = draw(st.sampled_from(["exchange"] * 4 + ["remove", "add"]))
        if change == "exchange":
            node[place] = draw(GARBAGE)
        elif change == "remove":
            del node[place]
        elif isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(GARBAGE)
        else:
            node.append(draw(GARBAGE))
    return value


def fuzz(examples: int) -> settings:
    """``AGENTRL_FUZZ_EXAMPLES=3000`` for a longer run than that of every build."""
    return settings(
        max_examples=int(EXAMPLES or examples),
        deadline=None,
        derandomize=EXAMPLES is None,  # a failing build must fail again
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )
