"""Which adapter answers: the name that is asked for, else the agent that asks, else the default."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_client import BODIES, ask
from scripted_sampler import Running

MODELS = {"asker": "asker", "answerer": "answerer", "base": None}
AGENTS = {"Asker": "asker", "Answerer": "answerer"}


@pytest.mark.parametrize("path", BODIES)
def test_name_then_agent_then_base(start: Callable[..., Running], path: str) -> None:
    gateway = start(models=MODELS, agents=AGENTS, default_adapter=None)
    gateway.sampler.adapters = {"asker": 1, "answerer": 2}
    asked = [
        ("asker", None, "asker"),
        ("answerer", "Asker", "answerer"),  # what is asked for by name counts before who asks
        ("gpt-4o-mini", "Asker", "asker"),
        ("gpt-4o-mini", "Answerer", "answerer"),
        ("base", "Asker", None),
        ("gpt-4o-mini", "Title writer", None),
        ("gpt-4o-mini", None, None),
    ]
    for model, agent, _ in asked:
        headers = {"x-agentrl-agent": agent} if agent else {}
        answer = ask(gateway, path, model=model, headers=headers)
        assert answer.status_code == 200, answer.text
    calls = sorted(gateway.calls(gateway.claims[0]), key=lambda call: call.seq)
    assert [(call.model, call.agent, call.adapter) for call in calls] == asked
    versions = {"asker": 1, "answerer": 2, None: None}
    assert [call.adapter_version for call in calls] == [versions[a] for _, _, a in asked]


def test_a_sole_adapter_answers_agents_it_does_not_know(start: Callable[..., Running]) -> None:
    gateway = start(models={"policy": "policy"}, agents={"Player": "policy"})
    ask(gateway, model="gpt-4o-mini", headers={"x-agentrl-agent": "Title writer"})
    [call] = gateway.calls(gateway.claims[0])
    assert (call.adapter, call.agent) == ("policy", "Title writer")
