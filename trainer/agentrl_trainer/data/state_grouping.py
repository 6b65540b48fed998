"""What an agent met before each of its turns: the states that step-level grouping compares.

GiGPO (arXiv:2505.10978, section 4.2) groups turns of different rollouts that began in the same
state. Here a state is what came since the model's last answer: a user's words, what tools and the
environment said. Not the whole prompt, which holds the history and is never the same twice.

Knows how the APIs write a conversation down (chat completions, Messages, Responses, text prompts).
Does not know advantages.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

from agentrl_tracer.schemas import Call

# Made up anew for each answer: two rollouts never share them.
_IDS = frozenset(["id", "call_id", "tool_call_id", "tool_use_id"])
# What of an answer the items of the Responses API are, besides messages.
_ANSWERED = frozenset(["function_call", "custom_tool_call", "reasoning"])


def anchor_states(turns: Sequence[Call]) -> list[Hashable]:
    """The state before each turn of one rollout; equal exactly where the agent met the same."""
    return [_state(call, turns[:i]) for i, call in enumerate(turns)]


def _state(call: Call, earlier: Sequence[Call]) -> Hashable:
    request = call.request or {}
    items = request.get("messages") or request.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if isinstance(items, list) and items:
        return (call.agent, _said(_new_items(cast(list[Any], items))))
    return (call.agent, *_new_tokens(call, earlier))


def _new_items(items: list[Any]) -> list[Any]:
    """Those since the model's last answer; what it is to go on from (a prefill) belongs to them."""
    end = len(items)
    while end > 1 and _is_answer(items[end - 1]):
        end -= 1
    last = max((i for i in range(end) if _is_answer(items[i])), default=-1)
    return items[last + 1 :]


def _is_answer(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    fields = cast(Mapping[str, Any], item)
    return fields.get("role") == "assistant" or fields.get("type") in _ANSWERED


def _said(items: list[Any]) -> str:
    return json.dumps(_without_ids(items), sort_keys=True, default=str)


def _without_ids(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        return {name: _without_ids(one) for name, one in fields.items() if name not in _IDS}
    if isinstance(value, list):
        return [_without_ids(one) for one in cast(list[Any], value)]
    return value


def _new_tokens(call: Call, earlier: Sequence[Call]) -> tuple[int, ...]:
    """Of a bare prompt: what it adds to the longest earlier turn that it goes on from."""
    told = [
        len(turn.prompt_ids) + len(turn.response_ids) for turn in earlier if _goes_on(call, turn)
    ]
    return tuple(call.prompt_ids[max(told, default=0) :] or call.prompt_ids)


def _goes_on(call: Call, turn: Call) -> bool:
    told = [*turn.prompt_ids, *turn.response_ids]
    return call.prompt_ids[: len(told)] == told
