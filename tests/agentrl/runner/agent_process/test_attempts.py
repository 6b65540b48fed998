"""Attempts of an async agent share a process and stay apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner_harness import RunnerHarness

from agentrl_tracer.schemas import AttemptState, Policies, RolloutState

ASYNC_AGENTS = """
import asyncio, os, time
from agentrl import emit_reward
together = 0

async def run(task):
    global together
    together += 1
    most = together
    for _ in range(20):
        await asyncio.sleep(0.02)
        most = max(most, together)
    print("I am", task["n"])
    if task["n"] == 3: raise ValueError("three")
    if task["n"] == 4: await asyncio.sleep(100)
    if task["n"] == 5: time.sleep(100)
    emit_reward({"n": task["n"], "most": most, "pid": os.getpid()})
    together -= 1

class Flow:
    def __init__(self): self.state = 0
    async def kickoff_async(self, inputs):
        self.state += 1
        await asyncio.sleep(0.1)
        return self.state + inputs["n"]

def blocking(task): return 1.0
"""


@pytest.fixture
def harness(harness: RunnerHarness) -> RunnerHarness:
    harness.agents.write_text(ASYNC_AGENTS)
    return harness


def test_async_rollouts_share_a_process(harness: RunnerHarness) -> None:
    harness.start("run", Policies(on_error="drop"), concurrency=6, timeout_s=4.0)
    ids = {n: harness.enqueue({"n": n})[0] for n in (0, 1, 2, 3, 4, 10)}
    attempts = {a.rollout_id: a for a in harness.finish(list(ids.values()), 60)}
    pids, most = set(), 0.0
    for n in (0, 1, 2, 10):
        attempt = attempts[ids[n]]
        earned = {r.name: r.value for r in harness.store.rewards([ids[n]])}
        assert (attempt.state, earned["n"]) == (AttemptState.SUCCEEDED, n)
        assert Path(attempt.log or "").read_text() == f"I am {n}\n"
        [root] = [s for s in harness.store.spans(ids[n]) if s.name.startswith("invoke_workflow")]
        assert root.attributes["agentrl.rollout.id"] == ids[n]
        pids.add(earned["pid"])
        most = max(most, earned["most"])
    assert len(pids) == 1
    assert most > 3
    failed, slow = attempts[ids[3]], attempts[ids[4]]
    assert failed.state is AttemptState.ERROR
    assert "ValueError: three" in (failed.error or "")
    assert slow.state is AttemptState.TIMEOUT


@pytest.mark.parametrize("first", [5, 1])
def test_a_task_that_blocks_its_process_is_killed_and_its_neighbors_run_again(
    harness: RunnerHarness, first: int
) -> None:
    harness.start("run", Policies(on_error="drop"), concurrency=2, timeout_s=2.0)
    ids = {n: harness.enqueue({"n": n}) for n in (first, 6 - first)}
    harness.finish([*ids[5], *ids[1]], 60)
    assert harness.store.attempts(ids[5])[-1].state is AttemptState.TIMEOUT
    [rollout] = harness.store.rollouts(harness.run_id, ids=ids[1])
    assert rollout.state is RolloutState.SUCCEEDED


@pytest.mark.parametrize(
    ("agent", "state"), [("Flow", AttemptState.SUCCEEDED), ("blocking", AttemptState.ERROR)]
)
def test_objects_are_fresh_and_blocking_agents_refused(
    harness: RunnerHarness, agent: str, state: AttemptState
) -> None:
    harness.start(agent, Policies(on_error="drop"), concurrency=4)
    attempts = harness.finish(harness.enqueue(count=3), 60)
    assert {a.state for a in attempts} == {state}
    if state is AttemptState.SUCCEEDED:
        assert {v for a in attempts for v in harness.values(a)} == {5.0}
    else:
        assert "is not async" in (attempts[0].error or "")


TURNS = """
import asyncio, time
loops, tasks, jobs = [], [], []

def job():
    time.sleep(0.1)
    jobs.append("done")

async def run(task):
    turns = len(loops)
    assert [one.cancelled() for one in tasks] == [True] * turns, "a task outlived its rollout"
    assert len(jobs) == turns, "a job outlived its rollout"
    loops.append(asyncio.get_running_loop())
    tasks.append(asyncio.create_task(asyncio.sleep(100)))
    loops[-1].run_in_executor(None, job)
    await asyncio.sleep(0)
    return turns + len(set(map(id, loops))) / 10
"""


def test_rollouts_in_turn_have_one_event_loop_and_leave_nothing_on_it(
    harness: RunnerHarness,
) -> None:
    harness.agents.write_text(TURNS)
    harness.start("run", Policies(on_error="drop"), rollouts_per_process=3)
    attempts = harness.finish(harness.enqueue(count=3))
    assert [attempt.error for attempt in attempts] == [None] * 3
    assert sorted(v for a in attempts for v in harness.values(a)) == [0.1, 1.1, 2.1]
