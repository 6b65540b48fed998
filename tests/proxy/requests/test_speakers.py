"""Agents that are told apart by what their requests hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
