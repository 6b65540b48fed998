"""Runners as actors of a local Ray cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_runner import FakeGateway, until

from agentrl.config import TrainConfig
from agentrl.runner import RunnerConfig
from agentrl_tracer.schemas import NewRollout, Purpose, RolloutState
from agentrl_tracer.store import Store

AGENT = """
import os, time
def agent(task):
    time.sleep(0.2)
    return task["n"]
"""


@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_runners_on_a_local_ray_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from agentrl.runner.on_ray import RayPool

    (tmp_path / "agents.py").write_text(AGENT)
    store = Store(str(tmp_path / "store.db"))
    gateway = FakeGateway(store)
    run_id = store.create_run("ray", "train", {})
    [task] = store.add_tasks(run_id, "train", [{"n": 3}])
    ids = store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, i, i) for i in range(8)])
    pool = RayPool(
        RunnerConfig(
            store=store.url,
            gateway=gateway.url,
            run_id=run_id,
            agent=f"{tmp_path / 'agents.py'}:agent",
            model="policy",
            logs=str(tmp_path / "logs"),
            runners=2,
            lease_s=4.0,
        )
    )
    try:
        [attempt] = until(lambda: store.attempts(ids)[:1], 120)
        # A runner is killed; Ray's actor or our pool starts another, and the rollout runs again.
        os.kill(int(attempt.runner.rsplit("-", 2)[1]), signal.SIGKILL)
        until(lambda: store.unfinished(ids) == 0 or (store.expire_leases() and False), 60)
        assert pool.alive()
    finally:
        pool.stop()
    assert {r.state for r in store.rollouts(run_id)} == {RolloutState.SUCCEEDED}
    assert [r.value for r in store.rewards(ids)] == [3.0] * 8
    gateway.close()
    store.close()


@pytest.mark.parametrize(
    ("given", "where", "count"), [("ray", "ray", 8), ("ray:3", "ray", 3), (5, "here", 5)]
)
def test_runners_say_where_they_run(tmp_path: Path, given: object, where: str, count: int) -> None:
    config = TrainConfig(agent="x:y", tasks=tmp_path, runners=given)  # type: ignore[arg-type]
    assert (config.runners_on, config.runners) == (where, count)
