"""Runners end to end: a real pool, a real store, and an HTTP server standing in for the gateway."""

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opentelemetry
import pytest
from fake_gateway import FakeGateway, until
from training_run import children

from agentrl.runner import PoolHandle, RunnerConfig, start_pool
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

AGENTS = '''
import asyncio, json, os, signal, subprocess, sys, threading, time
from pathlib import Path

def any_of_these(task): return globals()[task["agent"]](task)

from agentrl import emit_reward

def good(task):
    print("hello from", task["n"])
    emit_reward(task["n"])

def returns(task): return task["n"] / 2
def both(task):
    emit_reward(1.0)
    return 5.0
def silent(task): return True
async def later(task):
    await asyncio.sleep(0.01)
    return 3
def raises(task): raise ValueError("bad task " + str(task["n"]))
def exits(task): sys.exit(4)
def exits_hard(task): os._exit(7)
def kills_itself(task): os.kill(os.getpid(), signal.SIGKILL)
def loops(task):
    while True: pass
def stubborn(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try: time.sleep(100)
        except BaseException: pass
def family(task):
    child = subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
    print("sleeping", flush=True)
    Path(task["pids"]).write_text(f"{os.getpid()} {child.pid}")
    child.wait()
def daemonises(task):
    """A grandchild in a session of its own, whose parent is gone: no group reaches it."""
    code = "import os, sys, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
    code += "open(sys.argv[1], 'w').write(str(os.getpid()))\\ntime.sleep(100)"
    subprocess.run([sys.executable, "-S", "-c", code, task["pids"]], start_new_session=True)
    if task.get("stuck"): time.sleep(100)
    return 1.0
def deadlocks(task):
    lock = threading.Lock()
    other = threading.Thread(target=lambda: (lock.acquire(), lock.acquire()))  # not a daemon
    other.start()
    other.join()
def leaves_a_child(task):
    Path(task["pids"]).write_text(str(subprocess.Popen(["sleep", "100"]).pid))
    return 1.0
def environment(task):
    Path(task["file"]).write_text(json.dumps(dict(os.environ)))
def numbered(task):
    """Hangs in the first attempt only."""
    marker = Path(task["marker"])
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        time.sleep(100)
    return 1.0
def pid(task): return os.getpid()
'''


class House:
    """Everything a run needs, and shortcuts for the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "agents.py").write_text(AGENTS)
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
        until(lambda: self.store.unfinished(ids) == 0, timeout_s, self.log)
        return self.store.attempts(ids)

    def start_any(self, **settings: Any) -> PoolHandle:
        """A pool whose tasks say which agent runs; nothing is retried."""
        policies = Policies(on_error="drop", max_infrastructure_retries=0)
        return self.start("any_of_these", policies, **settings)

    def one(self, agent: str, task: dict[str, Any] | None = None) -> Attempt:
        """Runs one rollout of ``start_any``; returns its attempt."""
        [attempt] = self.finish(self.enqueue({"n": 4, "agent": agent, **(task or {})}))
        return attempt

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


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One pool for every test that needs nothing special: starting it takes a second."""
    built = House(tmp_path_factory.mktemp("quick"))
    built.start_any(timeout_s=1.0)
    yield built
    built.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path)
    yield built
    built.close()


def test_success_is_recorded_with_reward_root_span_and_log(quick: House) -> None:
    attempt = quick.one("good")
    assert attempt.state is AttemptState.SUCCEEDED
    assert quick.values(attempt) == [4.0]
    spans = {span.name: span for span in quick.store.spans(attempt.rollout_id)}
    root = spans["invoke_workflow any_of_these"]
    assert root.parent_span_id is None
    assert root.attributes["agentrl.attempt.id"] == attempt.id
    assert root.attributes["gen_ai.operation.name"] == "invoke_workflow"
    assert spans["agentrl.reward"].parent_span_id == root.span_id
    assert attempt.log == str(quick.folder / "logs" / f"{attempt.rollout_id}-1.log")
    assert Path(attempt.log).read_text() == "hello from 4\n"


@pytest.mark.parametrize(
    ("agent", "rewards"), [("returns", [2.0]), ("both", [1.0]), ("silent", []), ("later", [3.0])]
)
def test_a_returned_number_is_the_reward_unless_one_was_emitted(
    quick: House, agent: str, rewards: list[float]
) -> None:
    attempt = quick.one(agent)
    assert (attempt.state, quick.values(attempt)) == (AttemptState.SUCCEEDED, rewards)
    assert attempt.log is None  # nothing was printed: no empty file is left


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ("raises", "ValueError: bad task 4"),
        ("exits", "SystemExit: 4"),
        ("exits_hard", "exited with code 7"),
        ("kills_itself", "killed by signal 9"),
    ],
)
def test_a_failing_agent_is_an_error(quick: House, agent: str, error: str) -> None:
    attempt = quick.one(agent)
    assert attempt.state is AttemptState.ERROR
    assert error in (attempt.error or "")
    assert str(Path(__file__).parent) not in (attempt.error or "")


def test_the_traceback_shows_the_agent_and_not_the_runner(quick: House) -> None:
    attempt = quick.one("raises")
    assert attempt.error is not None
    assert "agents.py" in attempt.error
    assert "attempt.py" not in attempt.error
    assert attempt.log is not None
    assert attempt.error in Path(attempt.log).read_text()


def test_errors_are_retried_in_a_fresh_process(house: House) -> None:
    house.start("raises", Policies(max_attempts=3))
    attempts = house.finish(house.enqueue())
    assert [a.number for a in attempts] == [1, 2, 3]
    assert len({a.log for a in attempts}) == 3


@pytest.mark.parametrize("agent", ["loops", "stubborn", "deadlocks"])
def test_a_stuck_agent_is_killed(quick: House, agent: str) -> None:
    started = time.monotonic()
    attempt = quick.one(agent)
    assert attempt.state is AttemptState.TIMEOUT
    assert "still running after 1 s" in (attempt.error or "")
    assert time.monotonic() - started < 8


def test_a_timeout_kills_grandchildren(quick: House, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    attempt = quick.one("family", {"pids": str(file)})
    assert attempt.state is AttemptState.TIMEOUT
    assert not any(alive(pid) for pid in written(file))
    assert attempt.log is not None
    assert Path(attempt.log).read_text().startswith("sleeping\n")


def test_children_left_behind_by_a_good_agent_are_killed(quick: House, tmp_path: Path) -> None:
    attempt = quick.one("leaves_a_child", {"pids": str(tmp_path / "pids")})
    assert attempt.state is AttemptState.SUCCEEDED
    [child] = written(tmp_path / "pids")
    until(lambda: not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("stuck", [False, True])
def test_a_daemon_of_the_agent_is_killed(quick: House, tmp_path: Path, stuck: bool) -> None:
    attempt = quick.one("daemonises", {"pids": str(tmp_path / "pids"), "stuck": stuck})
    assert attempt.state is (AttemptState.TIMEOUT if stuck else AttemptState.SUCCEEDED)
    [daemon] = written(tmp_path / "pids")
    until(lambda: not alive(daemon))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_does_not_outlive_its_killed_worker(house: House, tmp_path: Path) -> None:
    pool = house.start("daemonises", lease_s=1.0)
    house.enqueue({"pids": str(tmp_path / "pids"), "stuck": True})
    [daemon] = written(tmp_path / "pids")
    [worker] = children(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(daemon))


@pytest.fixture(scope="module")
def other_venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment with OpenTelemetry, one package of its own, and nothing of ours."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("answer = 42\n")
    ours = Path(next(iter(opentelemetry.__path__))).parent
    wanted = ("opentelemetry", "requests", "urllib3", "charset_normalizer", "idna", "certifi",
              "google", "googleapis_common_protos", "importlib_metadata", "zipp",
              "typing_extensions", "wrapt")  # fmt: skip
    for path in ours.iterdir():
        if path.name.split("-")[0].split(".")[0].startswith(wanted):
            (packages / path.name).symlink_to(path)
    return str(folder / "bin/python")


def test_an_agent_runs_in_another_virtual_environment(house: House, other_venv: str) -> None:
    (house.folder / "agents.py").write_text(
        "import importlib.util, only_there, sys\nfrom agentrl import emit_reward\n"
        "def run(task):\n"
        "    assert importlib.util.find_spec('sqlalchemy') is None\n"
        "    print(sys.executable)\n"
        "    if task['n'] == 5: raise ValueError('there')\n"
        "    emit_reward(only_there.answer + task['n'])\n"
    )
    house.start("run", Policies(on_error="drop"), python=other_venv, rollouts_per_process=2)
    attempts = house.finish([*house.enqueue(count=3), *house.enqueue({"n": 5})], 60)
    assert [a.state for a in attempts] == [AttemptState.SUCCEEDED] * 3 + [AttemptState.ERROR]
    assert [house.values(a) for a in attempts] == [[46.0]] * 3 + [[]]
    assert Path(attempts[0].log or "").read_text() == f"{other_venv}\n"
    assert "ValueError: there" in (attempts[3].error or "")


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


def test_async_rollouts_share_a_process(house: House) -> None:
    (house.folder / "agents.py").write_text(ASYNC_AGENTS)
    house.start("run", Policies(on_error="drop"), concurrency=6, timeout_s=4.0)
    ids = {n: house.enqueue({"n": n})[0] for n in (0, 1, 2, 3, 4, 10)}
    attempts = {a.rollout_id: a for a in house.finish(list(ids.values()), 60)}
    pids, most = set(), 0.0
    for n in (0, 1, 2, 10):
        attempt = attempts[ids[n]]
        earned = {r.name: r.value for r in house.store.rewards([ids[n]])}
        assert (attempt.state, earned["n"]) == (AttemptState.SUCCEEDED, n)
        assert Path(attempt.log or "").read_text() == f"I am {n}\n"
        [root] = [s for s in house.store.spans(ids[n]) if s.name.startswith("invoke_workflow")]
        assert root.attributes["agentrl.rollout.id"] == ids[n]
        pids.add(earned["pid"])
        most = max(most, earned["most"])
    assert len(pids) == 1
    assert most > 3
    failed, slow = attempts[ids[3]], attempts[ids[4]]
    assert failed.state is AttemptState.ERROR
    assert "ValueError: three" in (failed.error or "")
    assert slow.state is AttemptState.TIMEOUT


def test_a_task_that_blocks_its_process_is_killed_and_its_neighbours_run_again(
    house: House,
) -> None:
    (house.folder / "agents.py").write_text(ASYNC_AGENTS)
    house.start("run", Policies(on_error="drop"), concurrency=2, timeout_s=2.0)
    blocking, good = house.enqueue({"n": 5}), house.enqueue({"n": 1})
    house.finish([*blocking, *good], 60)
    assert house.store.attempts(blocking)[-1].state is AttemptState.TIMEOUT
    [rollout] = house.store.rollouts(house.run_id, ids=good)
    assert rollout.state is RolloutState.SUCCEEDED


@pytest.mark.parametrize(
    ("agent", "state"), [("Flow", AttemptState.SUCCEEDED), ("blocking", AttemptState.ERROR)]
)
def test_objects_are_fresh_and_blocking_agents_refused(
    house: House, agent: str, state: AttemptState
) -> None:
    (house.folder / "agents.py").write_text(ASYNC_AGENTS)
    house.start(agent, Policies(on_error="drop"), concurrency=4)
    attempts = house.finish(house.enqueue(count=3), 60)
    assert {a.state for a in attempts} == {state}
    if state is AttemptState.SUCCEEDED:
        assert {v for a in attempts for v in house.values(a)} == {5.0}
    else:
        assert "is not async" in (attempts[0].error or "")


def test_runners_join_over_postgres(tmp_path: Path, postgres: str) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    store = Store(postgres)
    gateway = FakeGateway(store)
    spec = f"{tmp_path / 'agents.py'}:good"
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
        until(lambda: store.unfinished(ids) == 0 or joined.poll() is not None, 60)
        store.end_run(run_id, "finished")
        output = joined.communicate(timeout=30)[0]
    assert joined.returncode == 0, output
    assert f"2 runners for joined ({run_id})" in output
    assert {r.state for r in store.rollouts(run_id)} == {RolloutState.SUCCEEDED}
    assert [r.value for r in store.rewards(ids)] == [3.0] * 6
    gateway.close()
    store.close()


def test_an_interpreter_that_cannot_run_agents_is_refused(house: House, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python")
    with pytest.raises(ValueError, match=r"lacks opentelemetry.*-m pip install opentelemetry-sdk"):
        house.start("good", python=bare)
    with pytest.raises(ValueError, match="is no executable"):
        house.start("good", python=str(tmp_path / "nowhere"))


def test_the_environment_leads_unmodified_clients_to_the_gateway(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("TRACEPARENT", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    before = dict(os.environ)
    house.start_any()
    attempt = house.one("environment", {"file": str(tmp_path / "env")})
    env = json.loads((tmp_path / "env").read_text())
    base = f"{house.gateway.url}/rollouts/{attempt.rollout_id}"
    key = env["AGENTRL_KEY"]
    reference = house.store.authenticate(key)
    assert reference is not None
    assert reference.attempt_id == attempt.id
    expected = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "AGENTRL_GATEWAY": house.gateway.url,
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
    [root] = house.store.spans(attempt.rollout_id)
    assert env["TRACEPARENT"].split("-")[1:3] == [root.trace_id, root.span_id]
    assert root.parent_span_id is None
    assert dict(os.environ) == before


def test_commands_run_as_agents(house: House, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'sh -c \'cat > "$0"; echo "$AGENTRL_TASK $1" >> "$0"; exit $1\' {out} {{n}}'
    house.start(command, Policies(on_error="drop"))
    [good] = house.finish(house.enqueue({"n": 0}))
    assert good.state is AttemptState.SUCCEEDED
    assert out.read_text() == '{"n": 0}\n{"n": 0} 0\n'
    [bad] = house.finish(house.enqueue({"n": 3}))
    assert (bad.state, bad.error) == (AttemptState.ERROR, "the agent's command exited with code 3")


def test_a_killed_worker_loses_its_lease_and_its_agent(house: House, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pool = house.start("numbered", lease_s=1.0)
    ids = house.enqueue({"marker": str(marker)})
    [agent] = written(marker)
    [worker] = children(pool.pid)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(agent))
    first, second = house.finish(ids)
    assert (first.state, second.state) == (AttemptState.LOST, AttemptState.SUCCEEDED)
    assert "number 1 to die" in house.log()


def test_cancelling_kills_the_agent(house: House, tmp_path: Path) -> None:
    house.start("family", lease_s=0.6)
    house.enqueue({"pids": str(tmp_path / "pids")})
    pids = written(tmp_path / "pids")
    house.store.cancel(house.run_id, "enough")
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_pool(house: House, tmp_path: Path, how: signal.Signals) -> None:
    pool = house.start("family", lease_s=30)
    ids = house.enqueue({"pids": str(tmp_path / "pids")})
    pids = [*written(tmp_path / "pids"), *children(pool.pid)]
    os.kill(pool.pid, how)
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: not pool.alive())
    [attempt] = house.store.attempts(ids)
    assert attempt.state is AttemptState.INFRASTRUCTURE  # given back at once, no lease awaited
    [rollout] = house.store.rollouts(house.run_id)
    assert rollout.state is RolloutState.QUEUED
    pool.restart()
    assert pool.alive()
    assert pool.restarts == 1


def test_nothing_outlives_the_trainer(house: House, tmp_path: Path) -> None:
    house.run_id = house.store.create_run("test", "train", {})
    config = RunnerConfig(
        store=house.store.url, gateway=house.gateway.url, run_id=house.run_id, model="policy",
        agent=f"{house.folder / 'agents.py'}:family", logs=str(tmp_path / "logs"), runners=2,
    )  # fmt: skip
    code = (
        "import sys, time\nfrom agentrl.runner import RunnerConfig, start_pool\n"
        "pool = start_pool(RunnerConfig.from_json(sys.argv[1]))\n"
        "print(pool.pid, flush=True)\ntime.sleep(100)"
    )
    house.enqueue({"pids": str(tmp_path / "pids")})
    with subprocess.Popen(
        [sys.executable, "-c", code, config.to_json()], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pool = int(trainer.stdout.readline())
        pids = [*written(tmp_path / "pids"), *children(pool), pool]
        trainer.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_workers_wait_for_the_gateway(house: House) -> None:
    house.gateway.healthy = False
    house.start("good")
    ids = house.enqueue()
    time.sleep(1.5)
    assert house.store.attempts(ids) == []
    house.gateway.healthy = True
    [attempt] = house.finish(ids)
    assert attempt.state is AttemptState.SUCCEEDED


def test_a_restarted_gateway_costs_the_agent_no_attempt(house: House, tmp_path: Path) -> None:
    agents = house.folder / "agents.py"
    go = tmp_path / "go"
    agents.write_text(
        "import time\nfrom pathlib import Path\n"
        "def run(task):\n"
        f"    while not Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    raise RuntimeError('connection refused')\n"
    )
    house.start("run", Policies(on_error="drop", max_infrastructure_retries=1))
    ids = house.enqueue()
    until(lambda: house.store.attempts(ids))
    time.sleep(0.2)
    house.gateway.boot_id = "boot-2"
    go.touch()
    first, second = house.finish(ids)
    assert first.state is AttemptState.INFRASTRUCTURE
    assert "restarted meanwhile; the agent: " in (first.error or "")
    assert "connection refused" in (first.error or "")
    assert second.state is AttemptState.ERROR


def test_a_failed_sampler_call_is_infrastructure(house: House) -> None:
    house.start("raises", Policies(on_error="drop", max_infrastructure_retries=0), timeout_s=5)

    # The call is recorded as the gateway would, between the claim and the attempt's end.
    def record(attempt: Attempt) -> None:
        call = Call(
            "c1", "c1", 0, house.run_id, attempt.rollout_id, attempt.id, 0, None, "m", None, None,
            CallState.ERROR, [], [], [], None, {}, None, None, "out of memory", None, None,
            time.time(), time.time(),
        )  # fmt: skip
        house.store.write_calls("boot-1", [], [call], 1)

    (house.folder / "agents.py").write_text(
        "import time\ndef raises(task):\n    time.sleep(0.7)\n    raise ValueError('x')\n"
    )
    ids = house.enqueue()
    [attempt] = until(lambda: house.store.attempts(ids))
    record(attempt)
    [attempt] = house.finish(ids)
    assert attempt.state is AttemptState.INFRASTRUCTURE
    assert "out of memory" in (attempt.error or "")


def test_undelivered_rewards_are_infrastructure(house: House) -> None:
    house.gateway.takes_spans = False
    house.start_any()
    attempt = house.one("good")
    assert attempt.state is AttemptState.INFRASTRUCTURE
    assert "did not reach the gateway" in (attempt.error or "")


def test_many_rollouts_on_many_runners_each_in_its_own_process(house: House) -> None:
    house.start("pid", runners=4)
    ids = house.enqueue(count=40)
    attempts = house.finish(ids)
    assert {a.state for a in attempts} == {AttemptState.SUCCEEDED}
    assert len({reward.value for reward in house.store.rewards(ids)}) == 40
    assert len({a.runner for a in attempts}) >= 4


def test_frameworks_are_preloaded_and_the_users_modules_are_not(
    house: House, tmp_path: Path
) -> None:
    (house.folder / "agents.py").write_text(
        "import sys\nbefore = set(sys.modules)\nimport openai, neighbour_abc\n"
        "def run(task):\n    return float('openai' in before) + 2 * ('neighbour_abc' in before)\n"
    )
    (house.folder / "neighbour_abc.py").write_text("")
    house.start("run")
    attempts = house.finish(house.enqueue(count=3))
    assert {value for a in attempts for value in house.values(a)} == {1.0}


def test_a_package_that_starts_threads_is_left_to_the_attempts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = house.folder / "site-packages"
    packages.mkdir()
    (packages / "threaded_abc.py").write_text(
        "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)\n"
        "thread.start()\n"
    )
    (packages / "calm_abc.py").write_text("")
    (packages / "lazy_abc.py").write_text("")
    (house.folder / "agents.py").write_text(
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
    house.start("run")
    [first] = house.finish(house.enqueue())
    assert house.values(first) == [1.0], house.log()
    until(lambda: house.log().count("preloaded") == 2, log=house.log)
    time.sleep(0.2)  # the worker retires and is forked afresh, with what was imported lazily
    [second] = house.finish(house.enqueue())
    assert house.values(second) == [5.0], house.log()
    assert "threaded_abc starts threads" in house.log()


def test_a_disabled_opentelemetry_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(RuntimeError, match="OTEL_SDK_DISABLED"):
        house.start("good")


def test_a_wrong_agent_is_refused_before_anything_starts(house: House) -> None:
    (house.folder / "agents.py").write_text("def run(task): ...\n")
    with pytest.raises(ValueError, match="defines no 'missing'"):
        house.start("missing")
