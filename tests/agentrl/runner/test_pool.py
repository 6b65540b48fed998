"""A pool forks workers, preloads modules for them, and outlives neither them nor its trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_gateway import until
from runner_harness import AGENTS, RunnerHarness, alive, written
from store_records import enqueue
from training_run import children, workers

from agentrl_tracer.schemas import AttemptState, Purpose, RolloutState


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_does_not_outlive_its_killed_worker(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    pool = harness.start("daemonizes", lease_s=1.0)
    harness.enqueue({"pids": str(tmp_path / "pids"), "stuck": True})
    [daemon] = written(tmp_path / "pids")
    [worker] = workers(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(daemon))


def test_a_killed_workers_attempt_ends_at_once_with_its_agent(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    pool = harness.start("numbered", lease_s=60.0)
    ids = harness.enqueue({"marker": str(marker)})
    [agent] = written(marker)
    [worker] = workers(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(agent))
    first, second = harness.finish(ids)
    states = (first.state, second.state)
    assert states == (AttemptState.INFRASTRUCTURE, AttemptState.SUCCEEDED)
    assert "ended with -9; another one follows" in harness.log()


def test_runners_join_over_postgres_and_follow_the_gateway(tmp_path: Path, postgres: str) -> None:
    harness = RunnerHarness(tmp_path, postgres)
    store = harness.store
    config = {
        "agent": {"entrypoint": f"{AGENTS}:good"},
        "model": {"adapter": "policy"},
        "rollouts": {"timeout": 20.0, "lease": 2.0},
    }
    run_id = store.create_run("joined", "train", config)
    store.announce_gateways(run_id, ["http://127.0.0.1:9"])
    ids = enqueue(store, run_id, {"n": 3}, 6)
    command = [
        sys.executable, "-m", "agentrl", "runner", "--store", postgres,
        "--runners", "2", "--logs", str(tmp_path / "logs"),
    ]  # fmt: skip
    with (
        contextlib.closing(harness),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as joined,
    ):
        assert joined.stdout is not None
        assert f"2 runners for joined ({run_id})" in joined.stdout.readline()
        store.announce_gateways(run_id, [harness.gateway.url])  # the run was continued
        ended = lambda: not store.unfinished_ids(run_id, Purpose.TRAIN)  # noqa: E731
        until(lambda: ended() or joined.poll() is not None, 60)
        store.end_run(run_id, "finished")
        output = joined.communicate(timeout=30)[0]
        assert joined.returncode == 0, output
        assert f"the run's gateway is now at {harness.gateway.url}" in output
        assert {r.state for r in store.rollouts(run_id)} == {RolloutState.SUCCEEDED}
        assert [r.value for r in store.rewards(ids)] == [3.0] * 6


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_pool_which_is_started_again(
    harness: RunnerHarness, tmp_path: Path, how: signal.Signals
) -> None:
    pool, marker = harness.start("numbered", lease_s=30), tmp_path / "marker"
    ids = harness.enqueue({"marker": str(marker)})
    pids = [*written(marker), *workers(pool.pid), *children(pool.pid), pool.pid]
    # The process that forks is killed, or the one that has the store is asked to end.
    os.kill(children(pool.pid)[0] if how is signal.SIGKILL else pool.pid, how)
    until(lambda: not any(alive(pid) for pid in pids))
    [attempt] = harness.store.attempts(ids)
    assert attempt.state is AttemptState.INFRASTRUCTURE  # given back at once, no lease awaited
    [rollout] = harness.store.rollouts(harness.run_id)
    assert rollout.state is RolloutState.QUEUED
    pool.supervise()
    assert [a.state for a in harness.finish(ids)][1:] == [AttemptState.SUCCEEDED]
    assert pool.restarts == 1


def test_a_killed_store_process_gives_the_leases_of_its_pool_back(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    pool, marker = harness.start("numbered", lease_s=60.0), tmp_path / "marker"
    ids = harness.enqueue({"marker": str(marker)})
    pids = [*written(marker), *workers(pool.pid), *children(pool.pid)]
    os.kill(pool.pid, signal.SIGKILL)
    pool.supervise()
    first, second = harness.finish(ids)
    assert (first.state, first.error) == (AttemptState.LOST, "its runner died")
    assert second.state is AttemptState.SUCCEEDED
    until(lambda: not any(alive(pid) for pid in pids))


def test_nothing_outlives_the_trainer(harness: RunnerHarness, tmp_path: Path) -> None:
    config = harness.config("family", runners=2)
    code = (
        "import sys, time\n"
        "from agentrl.runner.pool_client import RunnerConfig, start_pool\n"
        "pool = start_pool(RunnerConfig.from_json(sys.argv[1]))\n"
        "print(pool.pid, flush=True)\ntime.sleep(100)"
    )
    harness.enqueue({"pids": str(tmp_path / "pids")})
    with subprocess.Popen(
        [sys.executable, "-c", code, config.to_json()], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pool = int(trainer.stdout.readline())
        pids = [*written(tmp_path / "pids"), *workers(pool), *children(pool), pool]
        trainer.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_packages_are_warm_but_not_those_with_threads_or_the_users_own_modules(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = harness.folder / "site-packages"
    packages.mkdir()
    for name, text in {
        "threaded_abc": "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)\n"
        "thread.start()\n",
        "calm_abc": "",
        "lazy_abc": "",
        # Makes Python believe that packages are installed there, in the pool and its re-execution.
        "sitecustomize": f"import site\nsite.getsitepackages = lambda: [{str(packages)!r}]\n",
    }.items():
        (packages / f"{name}.py").write_text(text)
    (harness.folder / "neighbor_abc.py").touch()
    harness.agents.write_text(
        "import sys\nbefore = set(sys.modules)\nimport calm_abc, neighbor_abc, threaded_abc\n"
        "def run(task):\n"
        "    assert threaded_abc.thread.is_alive() and 'neighbor_abc' not in before\n"
        "    warm = [name in before for name in ('calm_abc', 'threaded_abc', 'lazy_abc')]\n"
        "    import lazy_abc\n"
        "    return float(warm[0] + 2 * warm[1] + 4 * warm[2])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
    monkeypatch.setenv("AGENTRL_START_METHOD", "fork")  # with spawn nothing is preloaded
    harness.start("run")
    [first] = harness.finish(harness.enqueue())
    assert harness.values(first) == [1.0], harness.log()
    until(lambda: harness.log().count("preloaded") == 2, log=harness.log)
    time.sleep(0.2)  # the worker retires and is forked afresh, with what was imported lazily
    [second] = harness.finish(harness.enqueue())
    assert harness.values(second) == [5.0], harness.log()
    assert "threaded_abc starts threads" in harness.log()


def test_what_cannot_work_is_refused_before_anything_starts(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.agents.write_text("def run(task): ...\n")
    with pytest.raises(ValueError, match="defines no 'missing'"):
        harness.start("missing")
    with pytest.raises(ValueError, match="concurrency: got 2, but a command runs in a process"):
        harness.start("sh -c true", concurrency=2)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(RuntimeError, match="OTEL_SDK_DISABLED"):
        harness.start("run")
