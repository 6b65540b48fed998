"""Agents that are told apart by what their requests hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from official_clients import FUNCTION, claude, client
from scripted_sampler import Running

from agentrl_proxy.requests.speakers import SpeakerRule

RULES = [
    SpeakerRule("title", system="generate a .*title"),
    SpeakerRule("compaction", last="^Summarize"),
    SpeakerRule("topic", model="haiku"),
    SpeakerRule("helper", headers={"X-Parent": "."}),
    SpeakerRule("side", tools=False),
    SpeakerRule("main"),
]
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("expected", "asked", "headers"),
    [
        ("title", {"messages": [{"role": "system", "content": "You generate a short\ntitle."},
                                {"role": "user", "content": "Fix it."}]}, {}),
        ("compaction", {"messages": [{"role": "user", "content": "Summarize all."}]}, {}),
        ("main", {"messages": [{"role": "user", "content": "Summarize all."},
                               {"role": "user", "content": "Or not."}], "tools": TOOLS}, {}),
        ("topic", {"model": "claude-haiku"}, {}),
        ("helper", {"tools": TOOLS}, {"x-parent": "ses_1"}),
        ("side", {}, {}),
        ("main", {"tools": TOOLS}, {}),
        ("planner", {"tools": TOOLS}, {"x-agentrl-agent": "planner"}),
    ],
)  # fmt: skip
def test_the_first_rule_that_fits(
    start: Callable[..., Running], expected: str, asked: dict[str, Any], headers: dict[str, str]
) -> None:
    gateway = start(speakers=RULES)
    whole: Any = {"model": "policy", "messages": [{"role": "user", "content": "x"}], **asked}
    with client(gateway, gateway.claims[0]) as api:
        api.chat.completions.create(**whole, extra_headers=headers)
    [call] = gateway.calls(gateway.claims[0])
    assert call.agent == expected


def test_in_other_protocols_and_for_adapters(start: Callable[..., Running]) -> None:
    """Blocks of a system prompt count; an agent's adapter answers its calls, and counts them."""
    gateway = start(speakers=RULES, agents={"title": "policy"}, default_adapter=None)
    system: Any = [
        {"type": "text", "text": "You are."},
        {"type": "text", "text": "generate a title"},
    ]
    asked: Any = [{"role": "user", "content": "x"}]
    with claude(gateway, gateway.claims[0]) as api:
        api.messages.create(model="any", max_tokens=5, messages=asked, system=system)
        counted = api.messages.count_tokens(model="any", messages=asked, system=system)
    with client(gateway, gateway.claims[0]) as api:
        api.responses.create(model="any", input="x", instructions="Please generate a new title")
        api.completions.create(model="any", prompt="x")
    calls = gateway.calls(gateway.claims[0])
    assert [call.agent for call in calls] == ["title", "title", "side"]
    assert [call.adapter for call in calls] == ["policy", "policy", None]
    assert counted.input_tokens == len(calls[0].prompt_ids)


def test_the_first_call_after_a_compaction_is_a_branch_with_that_reason(
    start: Callable[..., Running],
) -> None:
    """Of each agent that spoke before, answered or not; one that begins later is a new
    conversation."""
    gateway = start(speakers=RULES)
    first: list[Any] = [{"role": "user", "content": "Fix it."}]
    after: list[Any] = [{"role": "user", "content": "Fix it. So far: nothing."}]
    with client(gateway, gateway.claims[0]) as api:

        def ask(messages: list[Any], **more: Any) -> list[Any]:
            answer = api.chat.completions.create(model="policy", messages=messages, **more)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            return [*messages, said, {"role": "user", "content": "Go on."}]

        helper: Any = {"tools": TOOLS, "extra_headers": {"x-parent": "ses_1"}}
        going_on = ask(ask(first, tools=TOOLS), tools=TOOLS)
        ask([*going_on[:-1], {"role": "user", "content": "Summarize all."}], tools=TOOLS)
        ask(after, **helper)
        edited = [{"role": "user", "content": "Fix it, as I said."}, *going_on[1:]]
        gateway.sampler.fail_after = 0
        with pytest.raises(openai.InternalServerError):
            ask(edited, tools=TOOLS)
        gateway.sampler.fail_after = None
        ask(ask(edited, tools=TOOLS), tools=TOOLS)
        ask(after, tools=TOOLS)
    calls = gateway.calls(gateway.claims[0])
    assert [(call.agent, call.params.get("branched")) for call in calls] == [
        ("main", "first_call"),
        ("main", None),
        ("compaction", None),
        ("helper", "new_conversation"),
        ("main", "compacted"),  # the one that failed
        ("main", "compacted"),
        ("main", None),
        ("main", "new_conversation"),
    ]
