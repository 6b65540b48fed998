"""An unmodified agent of each framework: traced, and trained for two steps.

Each has an environment of its own with the framework and the agent's side of the wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from agent_frameworks import FRAMEWORKS
from scripted_sampler import Running
from training_run import Run

from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import RolloutState

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

AGENTS = Path(__file__).parent / "calculators.py"
ATTEMPT = Path(__file__).parents[1] / "proxy/clients/attempt.py"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
# Semantic Kernel puts the plugin before a function's name; DSPy asks for fields.
SAID = {
    "semantic_kernel": [ADD.replace("add", "Sums-add"), "5"],
    "openai": ["5"],
    "dspy": ["[[ ## answer ## ]]\n5\n\n[[ ## completed ## ]]"],
}


SHORT = {
    "batch_size": 2, "group_size": 3, "max_tokens": 32, "on_error": 0, "timeout": 60,
    "eval_tasks": None,
}  # fmt: skip


def test_agents_and_tools_are_seen(
    framework: str, python: str, gateway: Running, tmp_path: Path
) -> None:
    [claim] = gateway.new_claims()
    said = SAID.get(framework, [ADD, "5"])
    turns = iter(said)
    gateway.sampler.script = lambda *_: next(turns, said[-1])
    config = RunnerConfig(
        store="", gateway=gateway.url, run_id=None, model="policy", logs=str(tmp_path),
        runners=1, timeout_s=60.0, lease_s=15.0, agent=f"{AGENTS}:{framework}",
    )  # fmt: skip
    done = subprocess.run(
        [python, str(ATTEMPT), config.to_json(), json.dumps(asdict(claim) | {"task": {}})],
        capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["state"] == "succeeded", done.stderr[-3000:]
    expected, spans = FRAMEWORKS[framework], gateway.store.spans(claim.rollout_id)
    calls = gateway.calls(claim)
    assert len(calls) >= len(said)
    assert {call.agent for call in calls} == {expected.agent}
    names = [span.name for span in spans]
    assert expected.tool is None or expected.tool in names, names
    assert expected.agent is None or f"invoke_agent {expected.agent}" in names
    assert not [name for name in names if name.startswith("autogen ")]
    if expected.tracing:  # each call below its span
        known = {span.span_id for span in spans}
        assert {call.span_id for call in calls} <= known


def trains(run: Run, agent: str | None) -> None:
    """Two steps of 2 groups of 3 rollouts: all calls are attributed, and judged."""
    run.finish(timeout_s=560)
    steps = run.steps()
    assert [row["step"] for row in steps] == [1, 2]
    accounting = run.accounting()  # which balances
    assert accounting.trained > 0, run.output
    assert "no_rollout" not in accounting.skipped
    assert {call.agent for call in run.calls()} == {agent}
    # Each rollout asks the same: none may be answered from another's cache.
    assert [row["reward/without_call"] for row in steps] == [0, 0]
    with run.store() as store:
        rollouts = store.rollouts(run.run_id)
        attempts = store.attempts([rollout.id for rollout in rollouts])
    assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
    ended = Counter(attempt.state for attempt in attempts)
    print(f"{dict(ended)}, {accounting}")  # noqa: T201


def test_two_steps_train(framework: str, python: str, tmp_path: Path) -> None:
    run = Run(tmp_path, f"{AGENTS}:{framework}", python=python, **SHORT)
    trains(run, FRAMEWORKS[framework].agent)


def test_vercel_under_node(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    (tmp_path / "package.json").write_text('{"private": true}')
    packages = ["ai@6", "@ai-sdk/openai@3", "zod@4"]
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *packages]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    if made.returncode:
        pytest.skip(f"npm could not install the SDK: {made.stderr[-300:]}")
    agent = shutil.copy(AGENTS.with_name("vercel_agent.mjs"), tmp_path)
    trains(Run(tmp_path, f"node {agent}", **SHORT), None)
