"""Unmodified agents of the common frameworks: span trees, and the agent of each call."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from scripted_sampler import Running

from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import Call, Reward, Span

ROOT = Path(__file__).parents[2]
AGENT_SIDE = os.pathsep.join(str(ROOT / name) for name in ("agentrl", "tracer"))
CLIENTS = Path(__file__).parent / "clients"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


class Trace:
    """What an attempt left in the store."""

    def __init__(self, calls: list[Call], spans: list[Span], rewards: list[Reward]) -> None:
        self.calls, self.rewards = calls, rewards
        self.spans = {span.span_id: span for span in spans}

    def path(self, span_id: str | None) -> list[str]:
        """Names from the root to a span; every parent must have arrived."""
        names: list[str] = []
        while span_id is not None:
            span = self.spans[span_id]
            names.insert(0, span.name)
            span_id = span.parent_span_id
        return names

    def path_of(self, name: str) -> list[str]:
        [found] = [s for s in self.spans.values() if s.name == name]
        return self.path(found.span_id)

    def reward(self, name: str) -> tuple[float, list[str]]:
        [found] = [r for r in self.rewards if r.name == name]
        return found.value, self.path(found.span_id)


@pytest.fixture
def attempt(shared_gateway: Running, tmp_path: Path) -> Callable[..., Trace]:
    def run(agent: str, said: list[str], interpreter: str = sys.executable) -> Trace:
        gateway = shared_gateway
        gateway.deps.context_length = 32768
        [claim] = gateway.new_claims()
        turns = iter(said)
        gateway.sampler.script = lambda *_: next(turns)
        config = RunnerConfig(
            store="", gateways=[gateway.url], run_id=None, model="policy", logs=str(tmp_path),
            runners=1, timeout_s=60.0, lease_s=15.0,
            agent=f"{CLIENTS / 'framework_agents.py'}:{agent}",
        )  # fmt: skip
        claim_json = json.dumps(asdict(claim) | {"task": {"question": "What is 2 + 3?"}})
        done = subprocess.run(
            [interpreter, str(CLIENTS / "attempt.py"), config.to_json(), claim_json],
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "CREWAI_STORAGE_DIR": str(tmp_path), "PYTHONPATH": AGENT_SIDE},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        assert report["state"] == "succeeded", done.stderr[-3000:]
        rollout, store = claim.rollout_id, gateway.store
        found = Trace(gateway.calls(claim), store.spans(rollout), store.rewards([rollout]))
        assert len({span.trace_id for span in found.spans.values()}) == 1
        assert not [s for s in found.spans.values() if "agentrl.unfinished" in s.attributes]
        for call in found.calls:  # linked to the span that made it, by both keys
            span = found.spans[call.span_id or ""]
            assert span.attributes["gen_ai.operation.name"] == "chat", found.spans
            assert span.attributes.get("gen_ai.response.id") in (call.response_id, None)
        return found

    return run


@needs("crewai")
def test_crewai(attempt: Callable[..., Trace]) -> None:
    found = attempt("crew", [ADD, "5", "yes"])
    root = ["invoke_workflow crew", "invoke_workflow Game"]
    crew = [*root, "Game.solve", "invoke_workflow crew", "task"]
    assert [c.agent for c in found.calls] == ["Solver", "Solver", "Critic"]
    for call, role in zip(found.calls, ["Solver", "Solver", "Critic"], strict=True):
        assert found.path(call.span_id) == [*crew, f"invoke_agent {role}", "chat policy"]
    tool = [*crew, "invoke_agent Solver", "execute_tool add"]
    assert found.path_of("execute_tool add") == tool
    assert found.reward("used the tool") == (0.25, tool)
    assert found.reward("turn") == (1.0, [*root, "Game.judge"])


@needs("langchain_openai", "langgraph", "opentelemetry.instrumentation.genai.langchain")
def test_langgraph(attempt: Callable[..., Trace]) -> None:
    found = attempt("graph", [ADD, "5"])
    assert [c.agent for c in found.calls] == ["calculator"] * 2
    agent = ["invoke_workflow graph", "invoke_agent calculator"]
    for call in found.calls:
        assert found.path(call.span_id) == [*agent, "chat policy"]
    assert found.reward("used the tool") == (0.25, [*agent, "execute_tool add"])


@needs("agents", "opentelemetry.instrumentation.genai.openai_agents")
def test_openai_agents(attempt: Callable[..., Trace]) -> None:
    found = attempt("openai_agents", [ADD, "5"])
    assert [c.agent for c in found.calls] == ["Adder"] * 2
    for call in found.calls:
        path = found.path(call.span_id)
        assert path[0] == "invoke_workflow openai_agents"
        assert path[-2:] == ["invoke_agent Adder", "chat policy"]
    assert found.reward("used the tool")[1][-2:] == ["invoke_agent Adder", "execute_tool add"]


@needs("openai", "opentelemetry.instrumentation.genai.openai")
def test_plain_openai(attempt: Callable[..., Trace], openai_python: str) -> None:
    found = attempt("plain", ["5"], openai_python)
    [call] = found.calls
    assert found.path(call.span_id) == ["invoke_workflow plain", "chat policy"]
    assert found.spans[call.span_id or ""].attributes["gen_ai.response.id"] == call.response_id
    assert found.reward("whole") == (1.0, ["invoke_workflow plain"])
