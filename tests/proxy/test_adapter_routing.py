"""Which adapter answers: the name that is asked for, else the agent that asks, else the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx
import pytest
from gateway_client import HTTP
from scripted_sampler import Running

MODELS = {"asker": "asker", "answerer": "answerer", "base": None}
AGENTS = {"Asker": "asker", "Answerer": "answerer"}
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


def post(
    gateway: Running, path: str, model: str, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    claim = gateway.claims[0]
    return HTTP.post(
        f"{gateway.base_url(claim)}/{path}",
        json={"model": model, **BODIES[path]},
        headers={"authorization": f"Bearer {claim.key}", **(headers or {})},
        timeout=30,
    )


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
        answer = post(gateway, path, model, {"x-agentrl-agent": agent} if agent else {})
        assert answer.status_code == 200, answer.text
    calls = sorted(gateway.calls(gateway.claims[0]), key=lambda call: call.seq)
    assert [(call.model, call.agent, call.adapter) for call in calls] == asked
    versions = {"asker": 1, "answerer": 2, None: None}
    assert [call.adapter_version for call in calls] == [versions[a] for _, _, a in asked]


def test_a_sole_adapter_answers_agents_it_does_not_know(start: Callable[..., Running]) -> None:
    gateway = start(models={"policy": "policy"}, agents={"Player": "policy"})
    post(gateway, "chat/completions", "gpt-4o-mini", {"x-agentrl-agent": "Title writer"})
    [call] = gateway.calls(gateway.claims[0])
    assert (call.adapter, call.agent) == ("policy", "Title writer")
