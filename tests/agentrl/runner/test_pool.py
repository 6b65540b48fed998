"""Runners end to end: a real pool, a real store, and an HTTP server standing in for the gateway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_gateway import FakeGateway, until
from runner_harness import AGENTS, RunnerHarness, alive, written
from training_run import children

from agentrl.runner import RunnerConfig
from agentrl_tracer.schemas import (
    Attempt,
    AttemptState,
    Call,
    CallState,
    NewRollout,
    Policies,
    Purpose,
    RolloutState,
)
from agentrl_tracer.store import Store


def test_success_is_recorded_with_reward_root_span_and_log(shared_harness: RunnerHarness) -> None:
    attempt = shared_harness.one("good")
    assert attempt.state is AttemptState.SUCCEEDED
    assert shared_harness.values(attempt) == [4.0]
    spans = {span.name: span for span in shared_harness.store.spans(attempt.rollout_id)}
    root = spans["invoke_workflow any_of_these"]
    assert root.parent_span_id is None
    assert root.attributes["agentrl.attempt.id"] == attempt.id
    assert root.attributes["gen_ai.operation.name"] == "invoke_workflow"
    assert spans["agentrl.reward"].parent_span_id == root.span_id
    assert attempt.log == str(shared_harness.folder / "logs" / f"{attempt.rollout_id}-1.log")
    assert Path(attempt.log).read_text() == "hello from 4\n"


@pytest.mark.parametrize(
    ("agent", "rewards"), [("returns", [2.0]), ("both", [1.0]), ("silent", []), ("later", [3.0])]
)
def test_a_returned_number_is_the_reward_unless_one_was_emitted(
    shared_harness: RunnerHarness, agent: str, rewards: list[float]
) -> None:
    attempt = shared_harness.one(agent)
    assert (attempt.state, shared_harness.values(attempt)) == (AttemptState.SUCCEEDED, rewards)
    assert attempt.log is None  # nothing was printed: no empty file is left


def test_a_failing_agent_is_an_error(shared_harness: RunnerHarness) -> None:
    errors = {
        "raises": "ValueError: bad task 4",
        "exits": "SystemExit: 4",
        "exits_hard": "exited with code 7",
        "kills_itself": "killed by signal 9",
    }
    attempts = dict(zip(errors, shared_harness.each(*errors), strict=True))
    for agent, attempt in attempts.items():
        assert attempt.state is AttemptState.ERROR
        assert errors[agent] in (attempt.error or "")
    # The traceback shows the agent, and not the runner.
    error, log = attempts["raises"].error, attempts["raises"].log
    assert error is not None
    assert "agents.py" in error
    assert "attempt.py" not in error
    assert error in Path(log or "").read_text()


def test_errors_are_retried_in_a_fresh_process(harness: RunnerHarness) -> None:
    harness.start("raises", Policies(max_attempts=3))
    attempts = harness.finish(harness.enqueue())
    assert [a.number for a in attempts] == [1, 2, 3]
    assert len({a.log for a in attempts}) == 3


def test_a_stuck_agent_is_killed(shared_harness: RunnerHarness) -> None:
    started = time.monotonic()
    for attempt in shared_harness.each("loops", "stubborn", "deadlocks"):
        assert attempt.state is AttemptState.TIMEOUT
        assert "still running after 1 s" in (attempt.error or "")
    assert time.monotonic() - started < 8


def test_a_timeout_kills_grandchildren(shared_harness: RunnerHarness, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    attempt = shared_harness.one("family", {"pids": str(file)})
    assert attempt.state is AttemptState.TIMEOUT
    assert not any(alive(pid) for pid in written(file))
    assert attempt.log is not None
    assert Path(attempt.log).read_text().startswith("sleeping\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_of_the_agent_is_killed(shared_harness: RunnerHarness, tmp_path: Path) -> None:
    attempt = shared_harness.one("daemonizes", {"pids": str(tmp_path / "pids")})
    assert attempt.state is AttemptState.SUCCEEDED
    [daemon] = written(tmp_path / "pids")
    until(lambda: not alive(daemon))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_does_not_outlive_its_killed_worker(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    pool = harness.start("daemonizes", lease_s=1.0)
    harness.enqueue({"pids": str(tmp_path / "pids"), "stuck": True})
    [daemon] = written(tmp_path / "pids")
    [worker] = children(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(daemon))


def test_runners_join_over_postgres(tmp_path: Path, postgres: str) -> None:
    store = Store(postgres)
    gateway = FakeGateway(store)
    spec = f"{AGENTS}:good"
    config = {"agent": spec, "adapter": "policy", "timeout": 20.0, "lease": 2.0}
    run_id = store.create_run("joined", "train", config)
    [task] = store.add_tasks(run_id, "train", [{"n": 3}])
    ids = store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, i, i) for i in range(6)])
    command = [
        sys.executable, "-m", "agentrl", "runner", "--store", postgres, "--gateway",
        gateway.url, "--runners", "2", "--logs", str(tmp_path / "logs"),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as joined:
        until(lambda: len(store.unfinished_ids(ids)) == 0 or joined.poll() is not None, 60)
        store.end_run(run_id, "finished")
        output = joined.communicate(timeout=30)[0]
    assert joined.returncode == 0, output
    assert f"2 runners for joined ({run_id})" in output
    assert {r.state for r in store.rollouts(run_id)} == {RolloutState.SUCCEEDED}
    assert [r.value for r in store.rewards(ids)] == [3.0] * 6
    gateway.close()
    store.close()


def test_the_environment_leads_unmodified_clients_to_the_gateway(
    harness: RunnerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("TRACEPARENT", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    before = dict(os.environ)
    harness.start_any()
    attempt = harness.one("environment", {"file": str(tmp_path / "env")})
    env = json.loads((tmp_path / "env").read_text())
    base = f"{harness.gateway.url}/rollouts/{attempt.rollout_id}"
    key = env["AGENTRL_KEY"]
    reference = harness.store.authenticate(key)
    assert reference is not None
    assert reference.attempt_id == attempt.id
    expected = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "AGENTRL_GATEWAY": harness.gateway.url,
        "AGENTRL_ROLLOUT_ID": attempt.rollout_id,
        "AGENTRL_ATTEMPT_ID": attempt.id,
        "AGENTRL_MODEL": "policy",
        "OTEL_EXPORTER_OTLP_ENDPOINT": base,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{key}",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "NO_PROXY": "example.org,127.0.0.1,localhost,::1",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert json.loads(env["AGENTRL_TASK"])["file"] == str(tmp_path / "env")
    [root] = harness.store.spans(attempt.rollout_id)
    assert env["TRACEPARENT"].split("-")[1:3] == [root.trace_id, root.span_id]
    assert root.parent_span_id is None
    assert dict(os.environ) == before


def test_commands_run_as_agents(harness: RunnerHarness, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'sh -c \'cat > "$0"; echo "$AGENTRL_TASK $1" >> "$0"; exit $1\' {out} {{n}}'
    harness.start(command, Policies(on_error="drop"))
    [good] = harness.finish(harness.enqueue({"n": 0}))
    assert good.state is AttemptState.SUCCEEDED
    assert out.read_text() == '{"n": 0}\n{"n": 0} 0\n'
    [bad] = harness.finish(harness.enqueue({"n": 3}))
    assert (bad.state, bad.error) == (AttemptState.ERROR, "the agent's command exited with code 3")


def test_a_killed_worker_loses_its_lease_and_its_agent(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    pool = harness.start("numbered", lease_s=1.0)
    ids = harness.enqueue({"marker": str(marker)})
    [agent] = written(marker)
    [worker] = children(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(agent))
    first, second = harness.finish(ids)
    assert (first.state, second.state) == (AttemptState.LOST, AttemptState.SUCCEEDED)
    assert "number 1 to die" in harness.log()


def test_cancelling_kills_the_agent(harness: RunnerHarness, tmp_path: Path) -> None:
    harness.start("family", lease_s=0.6)
    harness.enqueue({"pids": str(tmp_path / "pids")})
    pids = written(tmp_path / "pids")
    harness.store.cancel(harness.run_id, "enough")
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_pool(
    harness: RunnerHarness, tmp_path: Path, how: signal.Signals
) -> None:
    pool = harness.start("family", lease_s=30)
    ids = harness.enqueue({"pids": str(tmp_path / "pids")})
    pids = [*written(tmp_path / "pids"), *children(pool.pid)]
    os.kill(pool.pid, how)
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: not pool.alive())
    [attempt] = harness.store.attempts(ids)
    assert attempt.state is AttemptState.INFRASTRUCTURE  # given back at once, no lease awaited
    [rollout] = harness.store.rollouts(harness.run_id)
    assert rollout.state is RolloutState.QUEUED
    pool.restart()
    assert pool.alive()
    assert pool.restarts == 1


def test_nothing_outlives_the_trainer(harness: RunnerHarness, tmp_path: Path) -> None:
    harness.run_id = harness.store.create_run("test", "train", {})
    config = RunnerConfig(
        store=harness.store.url, gateway=harness.gateway.url, run_id=harness.run_id, model="policy",
        agent=f"{harness.folder / 'agents.py'}:family", logs=str(tmp_path / "logs"), runners=2,
        timeout_s=20.0, lease_s=5.0,
    )  # fmt: skip
    code = (
        "import sys, time\nfrom agentrl.runner import RunnerConfig, start_pool\n"
        "pool = start_pool(RunnerConfig.from_json(sys.argv[1]))\n"
        "print(pool.pid, flush=True)\ntime.sleep(100)"
    )
    harness.enqueue({"pids": str(tmp_path / "pids")})
    with subprocess.Popen(
        [sys.executable, "-c", code, config.to_json()], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pool = int(trainer.stdout.readline())
        pids = [*written(tmp_path / "pids"), *children(pool), pool]
        trainer.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_workers_wait_for_the_gateway(harness: RunnerHarness) -> None:
    harness.gateway.healthy = False
    harness.start("good")
    ids = harness.enqueue()
    time.sleep(1.5)
    assert harness.store.attempts(ids) == []
    harness.gateway.healthy = True
    [attempt] = harness.finish(ids)
    assert attempt.state is AttemptState.SUCCEEDED


def test_a_restarted_gateway_costs_the_agent_no_attempt(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    agents = harness.folder / "agents.py"
    go = tmp_path / "go"
    agents.write_text(
        "import time\nfrom pathlib import Path\n"
        "def run(task):\n"
        f"    while not Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    raise RuntimeError('connection refused')\n"
    )
    harness.start("run", Policies(on_error="drop", max_infrastructure_retries=1))
    ids = harness.enqueue()
    until(lambda: harness.store.attempts(ids))
    time.sleep(0.2)
    harness.gateway.boot_id = "boot-2"
    go.touch()
    first, second = harness.finish(ids)
    assert first.state is AttemptState.INFRASTRUCTURE
    assert "restarted meanwhile; the agent: " in (first.error or "")
    assert "connection refused" in (first.error or "")
    assert second.state is AttemptState.ERROR


def test_a_failed_sampler_call_is_infrastructure(harness: RunnerHarness) -> None:
    harness.start("raises", Policies(on_error="drop", max_infrastructure_retries=0), timeout_s=5)

    # The call is recorded as the gateway would, between the claim and the attempt's end.
    def record(attempt: Attempt) -> None:
        call = Call(
            "c1", "c1", 0, harness.run_id, attempt.rollout_id, attempt.id, 0, None, "m", None, None,
            CallState.ERROR, [], [], [], None, {}, None, None, "out of memory", None, None,
            time.time(), time.time(),
        )  # fmt: skip
        harness.store.write_calls("boot-1", [], [call], 1)

    (harness.folder / "agents.py").write_text(
        "import time\ndef raises(task):\n    time.sleep(0.7)\n    raise ValueError('x')\n"
    )
    ids = harness.enqueue()
    [attempt] = until(lambda: harness.store.attempts(ids))
    record(attempt)
    [attempt] = harness.finish(ids)
    assert attempt.state is AttemptState.INFRASTRUCTURE
    assert "out of memory" in (attempt.error or "")


def test_undelivered_rewards_are_infrastructure(harness: RunnerHarness) -> None:
    harness.gateway.takes_spans = False
    harness.start_any()
    attempt = harness.one("good")
    assert attempt.state is AttemptState.INFRASTRUCTURE
    assert "did not reach the gateway" in (attempt.error or "")


def test_many_rollouts_on_many_runners_each_in_its_own_process(harness: RunnerHarness) -> None:
    harness.start("pid", runners=4)
    ids = harness.enqueue(count=20)
    attempts = harness.finish(ids)
    assert {a.state for a in attempts} == {AttemptState.SUCCEEDED}
    assert len({reward.value for reward in harness.store.rewards(ids)}) == 20
    assert len({a.runner for a in attempts}) >= 4


def test_frameworks_are_preloaded_and_the_users_modules_are_not(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    (harness.folder / "agents.py").write_text(
        "import sys\nbefore = set(sys.modules)\nimport openai, neighbour_abc\n"
        "def run(task):\n    return float('openai' in before) + 2 * ('neighbour_abc' in before)\n"
    )
    (harness.folder / "neighbour_abc.py").write_text("")
    harness.start("run")
    attempts = harness.finish(harness.enqueue(), 60)
    assert {value for a in attempts for value in harness.values(a)} == {1.0}


def test_a_package_that_starts_threads_is_left_to_the_attempts(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = harness.folder / "site-packages"
    packages.mkdir()
    (packages / "threaded_abc.py").write_text(
        "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)\n"
        "thread.start()\n"
    )
    (packages / "calm_abc.py").write_text("")
    (packages / "lazy_abc.py").write_text("")
    (harness.folder / "agents.py").write_text(
        "import sys\nbefore = set(sys.modules)\nimport calm_abc, threaded_abc\n"
        "def run(task):\n"
        "    assert threaded_abc.thread.is_alive()\n"
        "    warm = [name in before for name in ('calm_abc', 'threaded_abc', 'lazy_abc')]\n"
        "    import lazy_abc\n"
        "    return float(warm[0] + 2 * warm[1] + 4 * warm[2])\n"
    )
    # Makes Python believe that packages are installed there, in the pool and its re-execution.
    (packages / "sitecustomize.py").write_text(
        f"import site\nsite.getsitepackages = lambda: [{str(packages)!r}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages))
    harness.start("run")
    [first] = harness.finish(harness.enqueue())
    assert harness.values(first) == [1.0], harness.log()
    until(lambda: harness.log().count("preloaded") == 2, log=harness.log)
    time.sleep(0.2)  # the worker retires and is forked afresh, with what was imported lazily
    [second] = harness.finish(harness.enqueue())
    assert harness.values(second) == [5.0], harness.log()
    assert "threaded_abc starts threads" in harness.log()


def test_a_disabled_opentelemetry_is_refused(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(RuntimeError, match="OTEL_SDK_DISABLED"):
        harness.start("good")


def test_a_wrong_agent_is_refused_before_anything_starts(harness: RunnerHarness) -> None:
    (harness.folder / "agents.py").write_text("def run(task): ...\n")
    with pytest.raises(ValueError, match="defines no 'missing'"):
        harness.start("missing")
