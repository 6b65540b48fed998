"""What the runners' tests share: a store, a stand-in gateway, pools, and looks at processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from fake_gateway import FakeGateway, until

from agentrl.runner import PoolHandle, RunnerConfig, start_pool
from agentrl_tracer.schemas import Attempt, NewRollout, Policies, Purpose
from agentrl_tracer.store import Store

AGENTS = Path(__file__).parent / "runner_agents.py"


class RunnerHarness:
    """A store, a stand-in gateway and pools of runners, with shortcuts for the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(AGENTS, folder / "agents.py")
        self.store = Store(str(folder / "store.db"))
        self.gateway = FakeGateway(self.store)
        self.pools: list[PoolHandle] = []
        self._tasks = 0

    def start(self, agent: str, policies: Policies | None = None, **settings: Any) -> PoolHandle:
        self.run_id = self.store.create_run("test", "train", {}, policies)
        defaults = {"runners": 1, "timeout_s": 20.0, "lease_s": 5.0, "model": "policy"}
        spec = agent if " " in agent else f"{self.folder / 'agents.py'}:{agent}"
        pool = start_pool(
            RunnerConfig(
                store=self.store.url,
                gateway=self.gateway.url,
                run_id=self.run_id,
                agent=spec,
                logs=str(self.folder / "logs"),
                **{**defaults, **settings},
            )
        )
        self.pools.append(pool)
        return pool

    def enqueue(self, task: dict[str, Any] | None = None, count: int = 1) -> list[str]:
        # A split of its own: a task stored before stays what it was.
        split = f"train-{self._tasks}"
        self._tasks += 1
        [task_id] = self.store.add_tasks(self.run_id, split, [task or {"n": 4}])
        new = [NewRollout(task_id, "g", Purpose.TRAIN, 0, i, i) for i in range(count)]
        return self.store.enqueue(self.run_id, new)

    def finish(self, ids: list[str], timeout_s: float = 20.0) -> list[Attempt]:
        """Waits for rollouts to end; returns their attempts."""
        until(lambda: len(self.store.unfinished_ids(ids)) == 0, timeout_s, self.log)
        return self.store.attempts(ids)

    def start_any(self, **settings: Any) -> PoolHandle:
        """A pool whose tasks say which agent runs; nothing is retried."""
        policies = Policies(on_error="drop", max_infrastructure_retries=0)
        return self.start("any_of_these", policies, **settings)

    def one(self, agent: str, task: dict[str, Any] | None = None) -> Attempt:
        """Runs one rollout of ``start_any``; returns its attempt."""
        [attempt] = self.finish(self.enqueue({"n": 4, "agent": agent, **(task or {})}))
        return attempt

    def each(self, *agents: str) -> list[Attempt]:
        """Run one rollout of each agent, at a time; return their attempts."""
        ids = [self.enqueue({"n": 4, "agent": agent})[0] for agent in agents]
        attempts = {attempt.rollout_id: attempt for attempt in self.finish(ids)}
        return [attempts[rollout_id] for rollout_id in ids]

    def values(self, attempt: Attempt) -> list[float]:
        return [reward.value for reward in self.store.rewards([attempt.rollout_id])]

    def log(self) -> str:
        return self.pools[-1].log_tail(50)

    def close(self) -> None:
        for pool in self.pools:
            pool.stop()
        self.gateway.close()
        self.store.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose new parent has not reaped it yet is dead enough.
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


def written(path: Path) -> list[int]:
    """The pids that an agent wrote down, as soon as it has."""
    return [int(word) for word in until(lambda: path.exists() and path.read_text()).split()]
