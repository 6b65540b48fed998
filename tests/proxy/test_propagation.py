"""Rollouts that share a process: calls, spans and rewards stay apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from scripted_sampler import Running

from agentrl_tracer.propagation import encode_name, mark_request
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import attributed

AGENTS = Path(__file__).parent / "clients" / "many_rollouts.py"
MANY = 24


ROOT = Path(__file__).parents[2]


def environment(gateway: Running) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("agentrl", "tracer")),
        "AGENTRL_GATEWAY": gateway.url,
        "OPENAI_BASE_URL": f"{gateway.url}/v1",
        "OPENAI_API_KEY": "nobody",
    }


def test_rollouts_in_one_process_keep_apart(gateway: Running, openai_python: str) -> None:
    claims = gateway.new_claims(MANY)
    gateway.sampler.delay = 0.001
    subprocess.run(
        [openai_python, AGENTS],
        input=json.dumps([asdict(claim) for claim in claims]),
        text=True,
        env=environment(gateway),
        check=True,
        timeout=120,
    )
    assert gateway.stats["refused"] == 0
    for number, claim in enumerate(claims):
        calls = gateway.calls(claim)
        said = [call.request["messages"][0]["content"] for call in calls if call.request]
        hows = {"thread", "pool", "cached"}
        if number % 2 == 0:
            hows |= {"async", "aiohttp", "executor", "to_thread"}
        assert sorted(said) == sorted(f"{number} {how}" for how in hows)

        rewards = gateway.store.rewards([claim.rollout_id])
        names = {"thread", "callback"}
        names |= {"task"} if number % 2 == 0 else set()
        names |= {"subprocess"} if number % 8 == 0 else set()
        assert sorted((r.name, r.value) for r in rewards) == sorted((n, number) for n in names)

        spans = {span.span_id: span for span in gateway.store.spans(claim.rollout_id)}
        assert len({span.trace_id for span in spans.values()}) == 1
        assert {s.attributes.get("number", number) for s in spans.values()} == {number}
        by_name = {span.name: span for span in spans.values()}
        expected = {"agent", "thread", "pool", "agentrl.reward"}
        if number % 2 == 0:
            expected |= {"turn", "executor", "to_thread", "agentrl.note"}
            turn = next(r for r in rewards if r.name == "task")
            assert turn.span_id == by_name["turn"].span_id
        assert expected <= set(by_name)
        for call in calls:
            assert call.request is not None
            how = call.request["messages"][0]["content"].split()[1]
            assert call.span_id in spans
            assert call.trace_id == by_name["agent"].trace_id
            alone = how in ("cached", "aiohttp")
            assert call.agent == (None if alone else f"agent {number}")


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("http://127.0.0.1:8123", True),
        ("http://localhost:8123", True),
        ("http://127.0.0.1:8124", False),
        ("https://api.openai.com", False),
    ],
)
def test_only_requests_to_the_gateway_are_marked(url: str, ours: bool) -> None:
    headers: dict[str, str] = {}
    with attributed({"AGENTRL_ROLLOUT_ID": "r", "AGENTRL_GATEWAY": "http://127.0.0.1:8123"}):
        mark_request(lambda: None, url, headers)
    assert ("x-agentrl-rollout" in headers) == ours
    outside: dict[str, str] = {}
    mark_request(lambda: None, url, outside)
    assert not outside


def test_names_survive_a_header() -> None:
    from agentrl_proxy.requests.recording import agent_name

    for name in ("player", "Spielführer\n 100%", "役割 (a; b)"):
        encoded = encode_name(name)
        assert encoded.isascii()
        assert agent_name({"x-agentrl-agent": encoded}) == " ".join(name.split())


def test_a_consumer_thread_works_as_the_rollout_that_started_it(gateway: Running) -> None:
    """The limit of attribution in a shared process: see docs/attribution.md."""
    starter, other = claims = gateway.new_claims(2)
    with subprocess.Popen(
        [sys.executable, AGENTS.with_name("consumer_thread.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(gateway),
    ) as script:  # fmt: skip
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdin.write(json.dumps([asdict(claim) for claim in claims]) + "\n")
        script.stdin.flush()
        assert script.stdout.readline() == "True\n"
        gateway.seal(starter)
        output = script.communicate("\n", timeout=60)[0]
    assert json.loads(output) == {"own": 200, "while": 200, "after": 409, "carried": 200}

    def said(claim: Claim) -> list[str]:
        calls = sorted(gateway.calls(claim), key=lambda call: call.seq)
        return [call.request["messages"][0]["content"] for call in calls if call.request]

    # While its starter runs, the thread's calls are its starter's, whichever rollout queued them.
    assert said(starter) == ["of the starter", "of the other, while the starter runs"]
    # After that they are refused and counted, never recorded.
    assert gateway.stats["sealed"] == 1
    # Work that carries its rollout's context, as executors do, belongs to that rollout.
    assert said(other) == ["of the other, carried"]
