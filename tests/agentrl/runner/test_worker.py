"""Workers end to end: how attempts end, in a real pool with a stand-in for the gateway."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_gateway import until
from runner_harness import RunnerHarness, alive, written
from store_records import start_run

from agentrl.runner import worker
from agentrl.runner.protocol import RunnerConfig
from agentrl.runner.store_process import StoreClient
from agentrl_tracer.schemas import Attempt, AttemptState, Call, CallState, Policies
from agentrl_tracer.store import Store


def test_success_is_recorded_with_reward_root_span_and_log(shared_harness: RunnerHarness) -> None:
    [attempt] = shared_harness.each("good")
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


def test_a_returned_number_is_the_reward_unless_one_was_emitted(
    shared_harness: RunnerHarness,
) -> None:
    rewards = {"returns": [2.0], "both": [1.0], "silent": [], "later": [3.0]}
    attempts = shared_harness.each(*rewards)
    assert {a.state for a in attempts} == {AttemptState.SUCCEEDED}
    assert [shared_harness.values(a) for a in attempts] == list(rewards.values())
    assert {a.log for a in attempts} == {None}  # nothing was printed: no empty file is left


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
    assert "attempts.py" not in error
    assert error in Path(log or "").read_text()


def test_an_agent_that_cannot_be_imported_is_an_error(harness: RunnerHarness) -> None:
    harness.agents.write_text("import not_installed_xyz\ndef run(task): ...\n")
    harness.start("run", Policies(on_error="drop"))
    [attempt] = harness.finish(harness.enqueue())
    assert attempt.state is AttemptState.ERROR
    assert (attempt.error or "").endswith("No module named 'not_installed_xyz'")
    assert Path(attempt.log or "").read_text().count("Traceback") == 1


def test_errors_are_retried_in_a_fresh_process(harness: RunnerHarness) -> None:
    harness.start("raises", Policies(max_attempts=3))
    attempts = harness.finish(harness.enqueue())
    assert [a.number for a in attempts] == [1, 2, 3]
    assert len({a.log for a in attempts}) == 3


def test_a_stuck_agent_and_its_children_are_killed(
    shared_harness: RunnerHarness, tmp_path: Path
) -> None:
    started, file = time.monotonic(), tmp_path / "pids"
    attempts = shared_harness.each("loops", "stubborn", "deadlocks", "family", pids=str(file))
    for attempt in attempts:
        assert attempt.state is AttemptState.TIMEOUT
        assert "still running after 1 s" in (attempt.error or "")
    assert time.monotonic() - started < 10
    assert not any(alive(pid) for pid in written(file))
    assert Path(attempts[-1].log or "").read_text().startswith("sleeping\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_of_the_agent_is_killed(shared_harness: RunnerHarness, tmp_path: Path) -> None:
    [attempt] = shared_harness.each("daemonizes", pids=str(tmp_path / "pids"))
    assert attempt.state is AttemptState.SUCCEEDED
    [daemon] = written(tmp_path / "pids")
    until(lambda: not alive(daemon))


def test_a_command_may_clean_up_when_its_time_is_up(harness: RunnerHarness, tmp_path: Path) -> None:
    policies = Policies(on_error="drop", max_infrastructure_retries=0)
    harness.start("sh -c {command}", policies, timeout_s=1.0)
    clean = tmp_path / "clean"
    command = f"trap 'sleep 0.5; touch {clean}; exit 1' TERM; sleep 30 & wait"
    [attempt] = harness.finish(harness.enqueue({"command": command}))
    assert attempt.state is AttemptState.TIMEOUT
    assert clean.exists()


def test_the_environment_leads_unmodified_clients_to_the_gateway(
    harness: RunnerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("TRACEPARENT", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    before = dict(os.environ)
    harness.start_any()
    [attempt] = harness.each("environment", file=str(tmp_path / "env"))
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
        "AGENTRL_CONTEXT_LENGTH": "4096",
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


def test_each_attempt_has_storage_of_its_own_until_its_process_ends(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    harness.start("stores", Policies(on_error="drop"), rollouts_per_process=2)
    ids = harness.enqueue({"file": str(tmp_path / "stored")}, count=2)
    attempts = harness.finish(ids)
    assert sorted(value for one in attempts for value in harness.values(one)) == [1, 2]
    folders = [Path(line) for line in (tmp_path / "stored").read_text().split()]
    assert len(set(folders)) == 2
    until(lambda: not any(folder.parents[1].exists() for folder in folders))


def test_commands_run_as_agents(harness: RunnerHarness, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'sh -c \'cat > "$0"; echo "$AGENTRL_TASK $1" >> "$0"; exit $1\' {out} {{n}}'
    harness.start(command, Policies(on_error="drop"))
    [good] = harness.finish(harness.enqueue({"n": 0}))
    assert good.state is AttemptState.SUCCEEDED
    assert out.read_text() == '{"n": 0}\n{"n": 0} 0\n'
    [bad] = harness.finish(harness.enqueue({"n": 3}))
    assert (bad.state, bad.error) == (AttemptState.ERROR, "the agent's command exited with code 3")


def test_a_canceled_rollouts_agent_is_killed(harness: RunnerHarness, tmp_path: Path) -> None:
    harness.start("family", lease_s=0.6)
    harness.enqueue({"pids": str(tmp_path / "pids")})
    pids = written(tmp_path / "pids")
    harness.store.cancel(harness.run_id, "enough")
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


@pytest.mark.parametrize(
    ("gateway", "then", "reason"),
    [
        ({"boot_id": "boot-2"}, "raise", "was restarted meanwhile; the agent: "),
        ({"healthy": False}, "raise", "the gateway does not answer; the agent: "),
        ({}, "raise", "the model failed call c1 (out of memory); the agent: "),
        ({"takes_spans": False}, "return", "did not reach the gateway"),
    ],
)
def test_what_the_gateway_fails_is_tried_again(
    harness: RunnerHarness, tmp_path: Path, gateway: dict[str, Any], then: str, reason: str
) -> None:
    go = tmp_path / "go"
    harness.start("goes", Policies(on_error="drop", max_infrastructure_retries=1))
    ids = harness.enqueue({"go": str(go), "then": then})
    [attempt] = until(lambda: harness.store.attempts(ids))
    time.sleep(0.2)
    vars(harness.gateway).update(gateway)
    if not gateway:
        record_failed_call(harness, attempt, "out of memory")
    go.touch()
    until(lambda: harness.store.attempts(ids)[0].state is not AttemptState.RUNNING)
    harness.gateway.healthy = harness.gateway.takes_spans = True
    first, second = harness.finish(ids)
    assert (first.state, second.number) == (AttemptState.INFRASTRUCTURE, 2)
    assert reason in (first.error or "")
    assert ("connection refused" in (first.error or "")) == (then == "raise")


def record_failed_call(harness: RunnerHarness, attempt: Attempt, error: str, **params: Any) -> None:
    """Record a call as the gateway would."""
    call = Call(
        "c1", "c1", 0, harness.run_id, attempt.rollout_id, attempt.id, 0, None, "m", None, None,
        CallState.ERROR, [], [], [], None, params, None, None, error, None, None, time.time(),
        time.time(),
    )  # fmt: skip
    harness.store.write_calls("boot-1", [], [call], 1)


def test_a_request_that_the_sampler_refuses_is_the_agents_error(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    harness.start("goes", Policies(on_error="drop"))
    ids = harness.enqueue({"go": str(tmp_path / "go"), "then": "raise"})
    [attempt] = until(lambda: harness.store.attempts(ids))
    record_failed_call(harness, attempt, "it has no grammars", error_status=400)
    (tmp_path / "go").touch()
    [attempt] = harness.finish(ids)
    assert attempt.state is AttemptState.ERROR


def test_a_worker_that_cannot_fork_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(worker, "ForkedChild", no_process)
    probe = SimpleNamespace(boot_id=lambda *_: "boot-1", context_length=None)
    monkeypatch.setattr(worker, "GatewayProbe", lambda _: probe)
    with closing(Store(str(tmp_path / "store.db"))) as store:
        run_id = start_run(store, rollouts=2)
        config = RunnerConfig(
            store=store.url, gateways=["http://gateway"], run_id=run_id, agent="x:y", model="m",
            logs=str(tmp_path), runners=1, timeout_s=60.0, lease_s=15.0,
        )  # fmt: skip
        ours, theirs = socket.socketpair()
        with ours, theirs:
            client = SimpleNamespace(
                connection=theirs, claim=store.claim, end_attempt=store.end_attempt
            )
            runner = worker.Worker(config, cast(StoreClient, client), 0, ours)
            runner._start_attempts()
        attempts = [rollout.attempts for rollout in store.rollouts(run_id)]
        assert attempts == [1, 0]


def test_many_rollouts_on_many_runners_each_in_its_own_process(harness: RunnerHarness) -> None:
    harness.start("pid", runners=4)
    ids = harness.enqueue(count=20)
    attempts = harness.finish(ids)
    assert {a.state for a in attempts} == {AttemptState.SUCCEEDED}
    assert len({reward.value for reward in harness.store.rewards(ids)}) == 20
    assert len({a.runner for a in attempts}) >= 4


@pytest.mark.parametrize("then", ["silent", "kills_itself"])
def test_a_log_keeps_the_beginning_and_the_end_of_much_output(
    harness: RunnerHarness, then: str
) -> None:
    limit = 1 << 20
    harness.start_any(log_bytes=limit)
    [attempt] = harness.each("floods", mib=64, then=then)
    text = Path(attempt.log or "").read_text()
    assert limit // 2 < len(text) <= limit
    assert text.startswith("the first line\n" + "x" * 99)
    assert text.endswith("x\nsaid by a command\nthe last line\n")
    [said] = [line for line in text.splitlines() if line.startswith("[agentrl: ")]
    cut, whole = int(said.split()[3]), 15 + 64 * 10_486 * 100 + 32
    # What is printed during a cut is not counted.
    assert 0.9 * whole < len(text) - len(said) - 2 + cut <= whole


def test_an_agent_that_kills_its_worker_is_blamed_the_third_time(harness: RunnerHarness) -> None:
    harness.start("kills_its_worker", Policies(on_error="drop"), lease_s=60.0)
    attempts = harness.finish(harness.enqueue(), 30)  # no lease is awaited
    infrastructure, error = AttemptState.INFRASTRUCTURE, AttemptState.ERROR
    assert [a.state for a in attempts] == [infrastructure, infrastructure, error]
    assert "its runner, which was killed by signal 9" in (attempts[-1].error or "")


def test_an_agent_that_kills_its_shared_process_is_blamed_alone(harness: RunnerHarness) -> None:
    harness.start("shares_a_process", Policies(on_error=-1.0), concurrency=4)
    killers = harness.enqueue({"seconds": 0.1, "kills": True}, 2)
    others = harness.enqueue({"seconds": 0.3, "kills": False}, 6)
    harness.finish(killers + others, 60)
    for rollout_id in killers:
        *before, last = harness.store.attempts([rollout_id])
        assert {a.state for a in before} == {AttemptState.INFRASTRUCTURE}
        assert len(before) >= 2
        assert (last.state, last.error) == (
            AttemptState.ERROR,
            "the agent's process exited with code 7",
        )
    assert {r.value for r in harness.store.rewards(killers)} == {-1.0}
    assert [r.value for r in harness.store.rewards(others)] == [1.0] * 6
