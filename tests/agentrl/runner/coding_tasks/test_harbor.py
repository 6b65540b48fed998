"""Rollouts as Harbor's trials: with a program that replays results, and with Harbor itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runner_harness import RunnerHarness

from agentrl.runner.coding_tasks.harbor import harbor_tasks
from agentrl.runner.pool_client import start_pool
from agentrl_tracer.schemas import AttemptState, Policies
from agentrl_tracer.store import Store

HARBOR = os.environ.get("AGENTRL_TEST_HARBOR")
SUPPORT = Path(__file__).parents[3] / "support"
REPLAY = f"""#!{sys.executable}
import json, os, pathlib, sys, time
config = json.load(open(sys.argv[-1]))
folder = pathlib.Path(config["trials_dir"]) / config["trial_name"]
folder.mkdir(parents=True)
(folder / "seen.json").write_text(json.dumps([config, dict(os.environ)]))
task = pathlib.Path(config["task"]["path"])
if (task / "slow").exists():
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(3)  # longer than other agents may take
        (task / "removed").touch()
        sys.exit(1)
result = task / "result.json"
if result.exists():
    (folder / "result.json").write_bytes(result.read_bytes())
"""
ONCE = Policies(on_error="drop", max_infrastructure_retries=0)


def add_task(folder: Path, instruction: str = "Do it.") -> Path:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text(instruction)
    return folder


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerHarness]:
    harness = RunnerHarness(tmp_path_factory.mktemp("harbor"))
    program = harness.folder / "harbor"
    program.write_text(REPLAY)
    program.chmod(0o755)
    before = Path.cwd()
    os.chdir(harness.folder)  # where the trials' folder is
    config = replace(harness.config("good", ONCE, runners=2), agent="harbor:tasks")
    harness.pools.append(start_pool(config))
    yield harness
    harness.close()
    os.chdir(before)


def raised(kind: str) -> dict[str, Any]:
    return {"exception_info": {"exception_type": kind, "exception_message": "why"}}


GRADED = {"verifier_result": {"rewards": {"reward": 0.5, "lines": 3}}}


@pytest.mark.parametrize(
    ("result", "state", "rewards"),
    [
        (GRADED, AttemptState.SUCCEEDED, [0.5]),
        ({"verifier_result": {"rewards": {"a": 1, "b": 0.5}}}, AttemptState.SUCCEEDED, [0.5, 1]),
        (GRADED | raised("AgentTimeoutError"), AttemptState.TIMEOUT, []),
        (raised("SandboxBuildFailedError"), AttemptState.INFRASTRUCTURE, []),
        (raised("NonZeroAgentExitCodeError"), AttemptState.ERROR, []),
        (
            raised("RuntimeError") | {"environment_setup": {"started_at": "2026"}},
            AttemptState.INFRASTRUCTURE,
            [],
        ),
        ({"step_results": [{}, raised("HealthcheckError")]}, AttemptState.INFRASTRUCTURE, []),
        ({"verifier_result": None}, AttemptState.ERROR, []),
        (None, AttemptState.INFRASTRUCTURE, []),
    ],
)
def test_a_result_is_a_reward_or_a_failure_with_its_state(
    trials: RunnerHarness, tmp_path: Path, result: Any, state: AttemptState, rewards: list[float]
) -> None:
    folder = add_task(tmp_path / "task")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    program = str(trials.folder / "harbor")
    settings = {"agent": "claude-code", "environment": "docker", "command": program, "host": "box"}
    [task] = harbor_tasks(tmp_path, settings)
    [attempt] = trials.finish(trials.enqueue(task))
    assert (attempt.state, sorted(trials.values(attempt))) == (state, rewards), attempt.error
    [seen] = trials.folder.glob(f"trials/*{attempt.id}/seen.json")
    config, env = json.loads(seen.read_text())
    assert config["agent"] == {"name": "claude-code", "model_name": "anthropic/policy"}
    assert env["ANTHROPIC_BASE_URL"].startswith("http://box:")
    assert env["ANTHROPIC_BASE_URL"].endswith(f"/rollouts/{attempt.rollout_id}")
    if state is not AttemptState.SUCCEEDED:
        assert str(seen.parent) in (attempt.error or "")


def test_at_the_time_limit_harbor_removes_its_containers(
    trials: RunnerHarness, tmp_path: Path
) -> None:
    folder = add_task(tmp_path / "task")
    (folder / "slow").touch()
    settings = {"agent": "a", "environment": "e", "command": str(trials.folder / "harbor")}
    [task] = harbor_tasks(tmp_path, settings | {"host": None})
    config = replace(trials.config("good", ONCE, timeout_s=1.0), agent="harbor:tasks")
    trials.pools.append(start_pool(config))
    [attempt] = trials.finish(trials.enqueue(task))
    assert attempt.state is AttemptState.TIMEOUT
    assert (folder / "removed").exists()


def test_a_folder_of_tasks_is_read_and_another_refused(tmp_path: Path) -> None:
    for name in ("b", "a"):
        add_task(tmp_path / name, f"Do {name}.")
    (tmp_path / "notes").mkdir()
    assert [task["instruction"] for task in harbor_tasks(tmp_path, {})] == ["Do a.", "Do b."]
    assert len(harbor_tasks(tmp_path / "a", {})) == 1
    with pytest.raises(ValueError, match=r"notes holds no Harbor task .* harbor download"):
        harbor_tasks(tmp_path / "notes", {})


@pytest.mark.harbor
@pytest.mark.timeout(0)  # it has a limit of its own
@pytest.mark.skipif(HARBOR is None, reason="AGENTRL_TEST_HARBOR is not Harbor's program")
@pytest.mark.parametrize(
    ("environment", "needed"),
    [("harbor_parts:BubblewrapEnvironment", "bwrap --version"), ("docker", "docker info")],
)
def test_harbor_itself_runs_the_rollouts_of_a_step(
    tmp_path: Path, environment: str, needed: str
) -> None:
    if subprocess.run(["sh", "-c", needed], capture_output=True, check=False).returncode:
        pytest.skip(f"`{needed}` fails here")
    for name, instruction in (("good", "Say RUN true"), ("bad", "FAIL")):
        folder = add_task(tmp_path / "tasks" / name, instruction)
        (folder / "environment").mkdir()
        (folder / "environment/Dockerfile").write_text("FROM debian:stable-slim\nWORKDIR /app\n")
        (folder / "tests").mkdir()
        (folder / "tests/test.sh").write_text("echo 0.25 > /logs/verifier/reward.txt\n")
    command = [
        *(sys.executable, "-m", "agentrl", "train", f"harbor:{tmp_path / 'tasks'}"),
        *("--harbor-agent", "harbor_parts:OneCall", "--agent.harbor-command", HARBOR or ""),
        *("--agent.harbor-environment", environment),
        *("--steps", "1", "--batch-size", "2", "--group-size", "2", "--runners", "2"),
        *("--rollouts.on-error", "drop", "--runs", str(tmp_path / "runs"), "--name", "run"),
    ]
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    subprocess.run([HARBOR or "", "--version"], check=True)
    limit = 300 + 60 * (time.monotonic() - began)  # a loaded machine takes as much longer
    env = os.environ | {"PYTHONPATH": path}
    subprocess.run(command, env=env, cwd=tmp_path, check=False, timeout=limit)
    with closing(Store(str(tmp_path / "runs/run/store.db"))) as store:
        [run] = store.runs()
        rollouts = store.rollouts(run["id"])
        attempts = store.attempts([one.id for one in rollouts])
        errors = [one.error for one in attempts if one.state is AttemptState.ERROR]
        rewards = store.rewards([one.id for one in rollouts])
        calls = store.calls(rollout_ids=[one.id for one in rollouts])
    assert [one.value for one in rewards] == [0.25, 0.25]
    assert len(calls) == 2
    assert len(errors) == 2
    assert all("AssertionError: told to fail" in (error or "") for error in errors)
