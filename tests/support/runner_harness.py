"""What the runners' tests share: a store, a stand-in gateway, pools, and looks at processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from fake_gateway import FakeGateway, until
from store_records import enqueue

from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig
from agentrl.supervisor import SupervisedProcess
from agentrl_tracer.schemas import Attempt, Policies, Purpose
from agentrl_tracer.store import Store

AGENTS = Path(__file__).parent / "runner_agents.py"


class RunnerHarness:
    """A store, a stand-in gateway and pools of runners, with shortcuts for the tests."""

    def __init__(self, folder: Path, store: str | None = None, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.agents = Path(shutil.copy(AGENTS, folder / "agents.py"))
        self.store = Store(store or str(folder / "store.db"))
        self.gateway = FakeGateway(self.store, host)
        self.pools: list[SupervisedProcess] = []
        self._tasks = 0

    def config(self, agent: str, policies: Policies | None = None, **settings: Any) -> RunnerConfig:
        """Create a run; return its runners' configuration."""
        self.run_id = self.store.create_run("test", "train", {}, policies)
        defaults: dict[str, Any] = {"runners": 1, "timeout_s": 20.0, "lease_s": 5.0}
        return RunnerConfig(
            store=self.store.url,
            gateways=[self.gateway.url],
            run_id=self.run_id,
            agent=agent if " " in agent else f"{self.agents}:{agent}",
            model="policy",
            logs=str(self.folder / "logs"),
            **defaults | settings,
        )

    def start(self, agent: str, policies: Policies | None = None, **settings: Any) -> Any:
        self.pools.append(start_pool(self.config(agent, policies, **settings)))
        return self.pools[-1]

    def enqueue(self, task: dict[str, Any] | None = None, count: int = 1) -> list[str]:
        self._tasks += 1  # a split of its own: a task stored before stays what it was
        return enqueue(self.store, self.run_id, task or {"n": 4}, count, f"train-{self._tasks}")

    def finish(self, ids: list[str], timeout_s: float = 20.0) -> list[Attempt]:
        """Waits for rollouts to end; returns their attempts."""

        def ended() -> bool:
            return self.store.unfinished_ids(self.run_id, Purpose.TRAIN).isdisjoint(ids)

        until(ended, timeout_s, self.log)
        return self.store.attempts(ids)

    def start_any(self, **settings: Any) -> None:
        """A pool whose tasks say which agent runs; nothing is retried."""
        policies = Policies(on_error="drop", max_infrastructure_retries=0)
        self.start("any_of_these", policies, **settings)

    def each(self, *agents: str, **task: Any) -> list[Attempt]:
        """Run one rollout of each agent, at a time; return their attempts."""
        ids = [self.enqueue({"n": 4, "agent": agent, **task})[0] for agent in agents]
        attempts = {attempt.rollout_id: attempt for attempt in self.finish(ids)}
        return [attempts[rollout_id] for rollout_id in ids]

    def values(self, attempt: Attempt) -> list[float]:
        return [reward.value for reward in self.store.rewards([attempt.rollout_id])]

    def log(self) -> str:
        return self.pools[-1].log_tail(50) if self.pools else ""

    def close(self) -> None:
        for pool in self.pools:
            pool.stop()
        self.gateway.close()
        self.store.close()


def alive(pid: int) -> bool:
    # A zombie whose new parent has not reaped it yet is dead enough.
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


def written(path: Path) -> list[int]:
    """The pids that an agent wrote down, as soon as it has."""
    return [int(word) for word in until(lambda: path.exists() and path.read_text()).split()]
