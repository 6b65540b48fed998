"""Runners as actors of local Ray clusters, of one node and of two."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import until
from runner_harness import RunnerHarness
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.runner.protocol import RunnerConfig
from agentrl.runner.ray import RayPool, _within_reach, check_reach
from agentrl_tracer.schemas import Purpose, RolloutState

AGENT = "import time\ndef agent(task):\n    time.sleep(0.2)\n    return task['n']\n"

# Of Ray's own.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore::ResourceWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]


def finish(harness: RunnerHarness, ids: list[str]) -> None:
    store = harness.store

    def ended() -> bool:
        store.expire_leases()
        return not store.unfinished_ids(harness.run_id, Purpose.TRAIN)

    until(ended, 100)
    rollouts = store.rollouts(harness.run_id)
    assert {r.state for r in rollouts} == {RolloutState.SUCCEEDED}
    winners = {r.winner for r in rollouts}  # a lost attempt may have got its reward out, too
    assert [r.value for r in store.rewards(ids) if r.attempt_id in winners] == [4.0] * len(ids)


def test_runners_on_a_local_ray_cluster(harness: RunnerHarness) -> None:
    pytest.importorskip("ray")
    harness.agents.write_text(AGENT)
    config = harness.config("agent", runners=2, timeout_s=60.0, lease_s=4.0)
    pool = RayPool(config)
    pool.supervise()
    import ray

    address = ray.util.get_node_ip_address()
    for listens, expected in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", address)):
        reached = _within_reach(ray, config, listens)  # nodes may join later
        assert reached.gateway.startswith(f"http://{expected}:")
    ids = harness.enqueue(count=8)
    try:
        [attempt] = until(lambda: harness.store.attempts(ids)[:1], 120)
        # A runner is killed; Ray's actor or our pool starts another, and the rollout runs again.
        os.kill(int(attempt.runner.rsplit("-", 2)[1]), signal.SIGKILL)
        finish(harness, ids)
        assert pool.restarts == 0
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with two CPUs and another node with two."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    built = Cluster()
    built.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
    built.other = built.add_node(num_cpus=2, object_store_memory=80 << 20)  # type: ignore[attr-defined]
    yield built
    built.shutdown()


@pytest.fixture
def joined(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """That cluster is the one which a pool joins."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()


@pytest.mark.parametrize(
    ("store", "gateway_host", "complaint"),
    [
        (
            "sqlite:////tmp/store.db",
            "0.0.0.0",
            r"run\.store: .* 2 nodes.* --run\.store",
        ),
        ("postgresql+psycopg://somewhere/x", "127.0.0.1", r"gateway\.host: .*--gateway\.host 0\.0"),
        ("postgresql+psycopg://somewhere/x", None, r"only `agentrl train`"),
    ],
)
def test_what_other_nodes_cannot_reach_is_refused(
    joined: Any, harness: RunnerHarness, store: str, gateway_host: str | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        RayPool(replace(harness.config("good"), store=store), gateway_host)


def test_two_nodes_share_the_work_and_one_of_them_may_die(
    joined: Any, tmp_path: Path, postgres: str
) -> None:
    import ray

    harness = RunnerHarness(tmp_path, postgres, "0.0.0.0")
    store = harness.store
    harness.agents.write_text(AGENT)
    # Its gateway is http://127.0.0.1:…, which the pool must not hand on.
    config = harness.config("agent", runners=4, timeout_s=60.0, lease_s=3.0)
    ids = harness.enqueue(count=60)
    pool = RayPool(config, "0.0.0.0")
    pool.supervise()
    try:
        assert pool._config.gateway.startswith(f"http://{ray.util.get_node_ip_address()}:")
        until(lambda: len({a.runner for a in store.attempts(ids)}) == 4, 100, pool.log_tail)
        joined.remove_node(joined.other, allow_graceful=False)
        killed = time.time()
        finish(harness, ids)
        assert pool.restarts == 0
    finally:
        pool.stop()
    later = {a.runner for a in store.attempts(ids) if a.started_at > killed + config.lease_s}
    assert 1 <= len(later) <= 2  # what fits on the node that is left
    harness.close()


def test_a_node_that_cannot_reach_the_gateway_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gateway = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = RunnerConfig(
            "sqlite:////nowhere/x.db", [gateway], "r", "a", "policy", "logs", 1, 60.0, 15.0
        )
        with pytest.raises(RuntimeError, match=r"run\.store: .*no /nowhere/x\.db"):
            check_reach(config)
    with pytest.raises(RuntimeError, match=r"cannot reach .*see --gateway\.host"):
        check_reach(config)


@pytest.mark.parametrize(
    ("given", "where", "count"), [("ray", "ray", 8), ("ray:3", "ray", 3), (5, "here", 5)]
)
def test_runners_say_where_they_run(tmp_path: Path, given: object, where: str, count: int) -> None:
    config = TrainConfig(**nested(agent="x:y", tasks=tmp_path, runners=given))
    assert (config.rollouts.runners_on, config.rollouts.runners) == (where, count)
