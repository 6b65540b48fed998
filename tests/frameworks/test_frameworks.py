"""An unmodified agent of each framework: traced, continued token for token, trained for two steps.

Each has an environment of its own with the framework and the agent's side of the wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from agent_frameworks import FRAMEWORKS, VERCEL, Framework
from scripted_sampler import Running
from training_run import Run

from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import Call, RolloutState

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
        store="", gateways=[gateway.url], run_id=None, model="policy", logs=str(tmp_path),
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
    assert len(calls) >= len(said) + expected.turns - 1
    assert_conversation(calls, expected)
    assert {call.agent for call in calls} == {expected.agent}
    names = [span.name for span in spans]
    assert expected.tool is None or expected.tool in names, names
    assert expected.agent is None or f"invoke_agent {expected.agent}" in names
    assert not [name for name in names if name.startswith("autogen ")]
    if expected.tracing:  # each call below its span
        known = {span.span_id for span in spans}
        assert {call.span_id for call in calls} <= known


def assert_conversation(calls: Sequence[Call], expected: Framework) -> None:
    """An attempt's calls are one conversation, which keeps its tokens and refers to its state."""
    calls = sorted(calls, key=lambda call: call.seq)
    assert len(calls) >= expected.turns
    first, *branched = [call.params.get("branched") for call in calls]
    assert (first, {*branched} - {expected.branched, None}) == ("first_call", set()), branched
    named = [(call.request or {}).get("previous_response_id") for call in calls]
    before = [call.response_id if expected.stateful else None for call in calls[:-1]]
    assert named == [None, *before]


def trains(run: Run, expected: Framework) -> None:
    """Two steps of 2 groups of 3 rollouts: all calls are attributed, continued and judged."""
    run.finish(timeout_s=560)
    steps = run.steps()
    assert [row["step"] for row in steps] == [1, 2]
    accounting = run.accounting()  # which balances
    assert accounting.trained > 0, run.output
    assert "no_rollout" not in accounting.skipped
    calls = run.calls()
    assert {call.agent for call in calls} == {expected.agent}
    # Each rollout asks the same: none may be answered from another's cache.
    assert [row["reward/without_call"] for row in steps] == [0, 0]
    with run.store() as store:
        rollouts = store.rollouts(run.run_id)
        attempts = store.attempts([rollout.id for rollout in rollouts])
    assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
    ended = Counter(attempt.state for attempt in attempts)
    print(f"{dict(ended)}, {accounting}")  # noqa: T201
    assert {call.attempt_id for call in calls} == {attempt.id for attempt in attempts}
    for attempt in attempts:
        assert_conversation([one for one in calls if one.attempt_id == attempt.id], expected)


def test_two_steps_train(framework: str, python: str, tmp_path: Path) -> None:
    run = Run(tmp_path, f"{AGENTS}:{framework}", python=python, **SHORT)
    trains(run, FRAMEWORKS[framework])


@pytest.fixture(scope="module")
def vercel_agent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The agent beside its SDK."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("vercel")
    (folder / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    command += VERCEL.requirements.split()
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    if made.returncode:
        pytest.skip(f"npm could not install the SDK: {made.stderr[-300:]}")
    return shutil.copy(AGENTS.with_name("vercel_agent.mjs"), folder)


def test_vercel_continues_its_conversation(
    vercel_agent: str, gateway: Running, tmp_path: Path
) -> None:
    [claim] = gateway.new_claims()
    turns = iter([ADD, "5", "9"])
    gateway.sampler.script = lambda *_: next(turns)
    url = {"OPENAI_BASE_URL": gateway.base_url(claim), "OPENAI_API_KEY": claim.key}
    subprocess.run(
        ["node", vercel_agent], check=True, timeout=100, cwd=tmp_path,
        env={**os.environ, **url, "AGENTRL_MODEL": "policy"},
    )  # fmt: skip
    assert len(gateway.calls(claim)) == 3
    assert_conversation(gateway.calls(claim), VERCEL)


def test_two_steps_train_vercel(vercel_agent: str, tmp_path: Path) -> None:
    trains(Run(tmp_path, f"node {vercel_agent}", **SHORT), VERCEL)
