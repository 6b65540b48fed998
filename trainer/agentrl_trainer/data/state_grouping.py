"""Find the state before each turn of an agent, by which step-level grouping compares turns.

GiGPO (arXiv:2505.10978, section 4.2) groups turns of different rollouts that began in the same
state. Here a state is what came since the model's last answer: messages of the user, of tools and
of the environment. The whole prompt holds the history, which is never the same twice.

Knows how the APIs write conversations (chat completions, Messages, Responses, text prompts).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

from agentrl_tracer.schemas import Call

# Fresh for each answer: two rollouts never share them.
_IDS = frozenset(["id", "call_id", "tool_call_id", "tool_use_id"])
# Items of the Responses API that belong to an answer, besides messages.
_ANSWERED = frozenset(["function_call", "custom_tool_call", "reasoning"])


def anchor_states(turns: Sequence[Call]) -> list[Hashable]:
    """Return the state before each turn of one rollout; equal states compare as equal."""
    states: list[Hashable] = []
    for i, call in enumerate(turns):
        request = call.request or {}
        items = request.get("messages") or request.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if isinstance(items, list) and items:
            new = _without_ids(_new_items(cast(list[Any], items)))
            states.append((call.agent, json.dumps(new, sort_keys=True, default=str)))
        else:
            # What a bare prompt adds to the longest earlier turn that it extends.
            wholes = [[*turn.prompt_ids, *turn.response_ids] for turn in turns[:i]]
            known = [len(one) for one in wholes if call.prompt_ids[: len(one)] == one]
            new = call.prompt_ids[max(known, default=0) :] or call.prompt_ids
            states.append((call.agent, *new))
    return states


def _new_items(items: list[Any]) -> list[Any]:
    """Select the items since the model's last answer; a prefill at the end belongs to them."""
    end = len(items)
    while end > 1 and _is_answer(items[end - 1]):
        end -= 1
    last = max((i for i in range(end) if _is_answer(items[i])), default=-1)
    return items[last + 1 :]


def _is_answer(item: Any) -> bool:
    fields = cast(Mapping[str, Any], item if isinstance(item, Mapping) else {})
    return fields.get("role") == "assistant" or fields.get("type") in _ANSWERED


def _without_ids(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        return {name: _without_ids(one) for name, one in fields.items() if name not in _IDS}
    if isinstance(value, list):
        return [_without_ids(one) for one in cast(list[Any], value)]
    return value
