"""Agents that fork, or replace and close their output: what works as a script works here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from runner_harness import RunnerHarness

from agentrl_tracer.schemas import Attempt, AttemptState, Policies

ODD_AGENTS = """
import asyncio, decimal, io, os, subprocess, sys, time, types
from agentrl import emit_reward

class Tee:
    def __init__(self, *files): self.files = files
    def write(self, text): return [file.write(text) for file in self.files][0]
    def flush(self): [file.flush() for file in self.files]

class NoRepr:
    def __repr__(self): raise RuntimeError("no repr")

def fork(task):
    pid = os.fork()
    if pid == 0:
        print("the child says hello")
        if task["how"] == "exits": sys.exit(3)
        if task["how"] == "raises": raise ValueError("in the child")
        if task["how"] == "odd code": sys.exit(2**40 + 7)
        if task["how"] == "rewards": emit_reward(0.25)
        return 5.0  # not a reward: it is no result of the agent
    time.sleep(0.3)
    _, status = os.waitpid(pid, 0)
    emit_reward(0.5 if os.waitstatus_to_exitcode(status) == task["code"] else -1)

def output(task):
    how = task["how"]
    print("I am", task["n"])
    if how == "tee": sys.stdout = Tee(sys.stdout)
    if how == "kept": sys.stdout = io.StringIO()
    if how == "closed": sys.stdout.close()
    if how == "none": sys.stdout = None
    if how == "error closed": sys.stderr.close()
    if how == "error closed": raise ValueError("the real reason")
    emit_reward(1.0)
    return NoRepr()

def subprocesses(task):
    how, code = task["how"], "from agentrl import emit_reward; emit_reward(0.5)"
    if how == "switched off":
        code = "import os; os.environ['OTEL_SDK_DISABLED'] = 'true'; " + code
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    subprocess.run([sys.executable, "-c", code], check=True, env=bare if how == "bare" else None)

def a_decimal(task):
    return decimal.Decimal("0.5")

def with_a_crewai_of_its_own(task):
    sys.modules["crewai"] = types.ModuleType("crewai")
    emit_reward(0.5)

def any_of_these(task):
    return globals()[task["agent"]](task)

async def slow_end(task):
    await asyncio.sleep(task["seconds"])
    emit_reward(1.0)
"""


@pytest.fixture
def harness(harness: RunnerHarness) -> RunnerHarness:
    harness.agents.write_text(ODD_AGENTS)
    return harness


def log_of(attempt: Attempt) -> str:
    return "" if attempt.log is None else Path(attempt.log).read_text()


def test_a_forked_child_that_leaves_the_agent_ends_alone(harness: RunnerHarness) -> None:
    harness.start("any_of_these", Policies(on_error="drop"), rollouts_per_process=10)
    for how, code in [
        ("exits", 3), ("raises", 1), ("returns", 0), ("rewards", 0), ("odd code", 7)
    ]:  # fmt: skip
        ids = harness.enqueue({"agent": "fork", "how": how, "code": code})
        [attempt] = harness.finish(ids)
        assert attempt.state is AttemptState.SUCCEEDED
        assert harness.values(attempt) == ([0.25, 0.5] if how == "rewards" else [0.5])
        said = log_of(attempt)
        assert said.count("the child says hello") == 1
        assert ("ValueError: in the child" in said) == (how == "raises")


@pytest.mark.parametrize(
    "task",
    [
        {"agent": "subprocesses", "how": "bare"},
        {"agent": "subprocesses", "how": "switched off"},
        {"agent": "a_decimal"},
        {"agent": "with_a_crewai_of_its_own"},
    ],
    ids=["bare environment", "OpenTelemetry switched off", "decimal", "crewai"],
)
def test_the_reward_arrives(harness: RunnerHarness, task: dict[str, str]) -> None:
    harness.start("any_of_these", Policies(on_error="drop"))
    [attempt] = harness.finish(harness.enqueue(task))
    assert attempt.state is AttemptState.SUCCEEDED
    assert harness.values(attempt) == [0.5]


@pytest.mark.parametrize("how", ["tee", "kept", "closed", "none", "error closed"])
def test_the_next_rollout_of_the_process_has_its_output(harness: RunnerHarness, how: str) -> None:
    harness.start("any_of_these", Policies(on_error="drop"), rollouts_per_process=10)
    attempts = [
        attempt
        for n in range(3)
        for attempt in harness.finish(harness.enqueue({"agent": "output", "how": how, "n": n}))
    ]
    if how == "error closed":
        assert all((one.error or "").endswith("the real reason") for one in attempts)
    else:
        assert [harness.values(one) for one in attempts] == [[1.0]] * 3
    for n, attempt in enumerate(attempts):
        assert (f"I am {n}" in log_of(attempt)) == (how != "kept" or n == 0)


def test_time_that_is_up_while_spans_are_sent_blocks_no_neighbor(harness: RunnerHarness) -> None:
    harness.gateway.delay_s = 0.6
    policies = Policies(on_timeout="drop", max_infrastructure_retries=0)
    harness.start("slow_end", policies, concurrency=4, timeout_s=2.0)
    ids = harness.enqueue({"seconds": 1.8})
    time.sleep(0.6)
    ids += harness.enqueue({"seconds": 1.0}, 2)
    states = {one.state for one in harness.finish(ids, 40)}
    assert states <= {AttemptState.SUCCEEDED, AttemptState.TIMEOUT}
