"""``--sampler vllm``: its settings, its process, and a whole run of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import real_vllm
import torch
from fake_gateway import until
from runner_harness import alive
from settings import flags, nested
from small_models import qwen3, save_model
from tiny_policy import RANK, Policy
from training_run import Run, wait_for

from agentrl import timing
from agentrl.config.commands import ServeConfig, TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.samplers.vllm.server import VllmServer, planned_servers, vllm_command
from agentrl_tracer.schemas import AttemptState, Purpose
from agentrl_trainer.models.sources import ModelError

CLI = [sys.executable, "-m", "agentrl"]


def config(**settings: Any) -> ServeConfig:
    return ServeConfig.model_validate(nested(**settings))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"vllm_url": "http://gpu:8000"}, 'without sampler.kind = "vllm"'),
        ({"sampler": "vllm", "vllm_url": "gpu:8000"}, "sampler\\nvllm.url|vllm.url"),
        ({"sampler": "vllm", "vllm_url": "http://gpu:8000", "vllm_args": "-x"}, "runs already"),
        ({"sampler": "vllm", "vllm_key_env": "HOME"}, "needs no key"),
        ({"sampler": "vllm", "kv_tokens": 5000}, "kv_tokens: has no effect without sampler.kind"),
        ({"sampler": "vllm", "vllm_wait": 5}, "vllm.wait: has no effect without sampler.vllm.url"),
        ({"sampler": "vllm", "vllm_url": "http://gpu", "vllm_key_env": "NOT_SET"}, "NOT_SET"),
        ({"sampler": "triton"}, "embedded"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config(**settings)


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    settings = config(sampler="vllm", vllm_python=sys.executable)
    with pytest.raises(ConfigError, match="has no vLLM"):
        vllm_command(settings, 8)
    for elsewhere in (config(), config(sampler="vllm", vllm_url="http://gpu:8000")):
        assert planned_servers(elsewhere, tmp_path, max_rank=None) == []


@pytest.mark.parametrize(
    ("cuda", "mps", "device", "stored", "dtype", "eager"),
    [
        (False, False, "auto", "bfloat16", "float32", True),
        (False, True, "auto", "bfloat16", "bfloat16", True),
        (True, False, "auto", "bfloat16", "bfloat16", False),
        (True, False, "auto", "float32", "float32", False),
        (True, False, "cpu", "bfloat16", "float32", True),
        (False, False, "cuda:1", "bfloat16", "bfloat16", False),
    ],
)
def test_vllm_has_the_precision_of_the_trainers_device(
    cuda: bool, mps: bool, device: str, stored: str, dtype: str, eager: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    (python := tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")  # has vLLM
    python.chmod(0o755)
    model = save_model(qwen3(layers=1).to(getattr(torch, stored)), tmp_path / "model")
    settings = config(
        sampler="vllm", vllm_python=str(python), device=device, **{"model.name": model}
    )
    command = vllm_command(settings, 8)
    assert command[command.index("--dtype") + 1] == dtype
    assert ("--enforce-eager" in command) == eager


# Runs the leash process, impatiently.
_LEASH = """
import sys
from agentrl.samplers.vllm import recovery, server
server._END_GRACE_S, recovery._POLL_S = 0.3, 0.05
sys.exit(server.main(sys.argv[1:]))
"""
# Starts a process of its own, as vLLM does, prints its id, and ignores SIGTERM.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
# Answers like a server whose engine dies after two requests, and then waits forever.
_BEREFT = """
import http.server, signal, socketserver, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
answers = iter([200, 200])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(next(answers, 503))
        self.end_headers()
    def address_string(self):
        return "test"
socketserver.UnixStreamServer(sys.argv[2], Handler).serve_forever()
"""


@contextlib.contextmanager
def leashed(script: str, socket: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", script, "--uds", str(socket)]
    with subprocess.Popen(
        [sys.executable, "-c", _LEASH, *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as leash:  # fmt: skip
        yield leash


@pytest.mark.parametrize("how", ["terminated", "orphaned", "killed"])
def test_the_server_ends_with_its_starter(how: str, tmp_path: Path) -> None:
    with leashed(_STUBBORN, tmp_path / "socket") as leash:
        assert leash.stdout is not None
        assert leash.stdin is not None
        grandchild = int(leash.stdout.readline())
        ends = {
            "terminated": leash.terminate,
            "orphaned": leash.stdin.close,
            "killed": leash.kill,
        }
        ends[how]()
        assert leash.wait(30) != 0
        until(lambda: not alive(grandchild), 30)


def test_a_server_without_its_engine_is_ended(tmp_path: Path) -> None:
    with leashed(_BEREFT, tmp_path / "socket") as leash:
        assert leash.wait(60) == 128 + signal.SIGKILL


# Says how far it is, and listens when it may.
_SLOW = """#!{python}
import pathlib, socket, sys, time
print("Loading weights", flush=True)
while not pathlib.Path("{permission}").exists():
    time.sleep(0.02)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[sys.argv.index("--uds") + 1])
listening.listen()
time.sleep(600)
"""


def test_how_far_a_server_is_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST_NOTICE_S", 0.05)
    script, permission, told = tmp_path / "slow", tmp_path / "permission", list[str]()
    script.write_text(_SLOW.format(python=sys.executable, permission=permission))
    script.chmod(0o700)
    server = VllmServer([str(script)], tmp_path / "vllm.log")

    def tell(said: str) -> None:
        told.append(said)
        if said.endswith(" s) Loading weights"):
            permission.touch()

    server.start()
    try:
        server.wait(tell)
    finally:
        server.stop()
    assert told[-1].startswith("vLLM is starting (")
    assert permission.exists()


@pytest.mark.parametrize(
    ("settings", "own", "threads"),
    [
        ({"max_staleness": 1}, {}, "nobind 4"),
        ({"max_staleness": 1, "samplers": 2, "gateways": 2}, {}, "nobind 2"),
        ({"samplers": 2, "gateways": 2}, {}, "nobind 3"),
        ({"max_staleness": 1}, {"VLLM_CPU_OMP_THREADS_BIND": "0-2"}, "0-2 None"),
        ({}, {}, "None None"),
    ],
)
def test_a_cpu_is_shared_with_a_trainer_that_computes_at_the_same_time(
    settings: Any, own: dict[str, str], threads: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = tmp_path / "vllm/entrypoints/openai/api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(
        "import os; get = os.environ.get\n"
        "print('has', get('VLLM_CPU_OMP_THREADS_BIND'), get('OMP_NUM_THREADS'), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    told = {"agent": "a.py:a", "tasks": "t", "sampler": "vllm", "device": "cpu", "cores": 8}
    config = TrainConfig.model_validate(nested(**told, **settings))
    first, *_ = planned_servers(config, tmp_path / "vllm.log", max_rank=8)
    first.start()
    try:
        until(lambda: f"has {threads}\n" in first.log.read_text(), 60)
    finally:
        first.stop()


def test_a_device_that_the_trainer_does_not_have_is_refused_before_vllm_starts(
    tmp_path: Path,
) -> None:
    (python := tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")  # has vLLM
    python.chmod(0o755)
    told = {"agent": "a.py:a", "tasks": "t", "sampler": "vllm", "vllm_python": str(python)}
    settings = TrainConfig.model_validate(nested(**told, device="cuda:99"))
    with pytest.raises(ModelError, match=r"device: 'cuda:99' cannot be used: .* Use auto or cpu"):
        planned_servers(settings, tmp_path / "vllm.log", max_rank=8)


def starts_vllm(test: Callable[..., None]) -> Callable[..., None]:
    reason = "AGENTRL_TEST_VLLM_PYTHON names no interpreter"
    marked = pytest.mark.skipif(not real_vllm.PYTHON, reason=reason)(test)
    return pytest.mark.vllm(pytest.mark.timeout(2000)(marked))


def engine(log: Path) -> int:
    """The process id of the engine that the server's log names last."""
    return int(log.read_text().rpartition("(EngineCore pid=")[2].partition(")")[0])


def check_run(run: Run, steps: int) -> set[tuple[str | None, int | None]]:
    """Check books, log-probs and adapter versions; return the adapters and versions that answered.

    Each step's rollouts are answered by the version that the step before it made.
    """
    run.accounting()
    assert [row["step"] for row in run.steps()] == [*range(1, steps + 1)]
    for row in run.steps():
        assert row["sampler_trainer/max_logprob_difference"] < 1e-3
    with run.store() as store:
        rollouts = {one.id: one for one in store.rollouts(run.run_id, purpose=Purpose.TRAIN)}
    for call in run.calls(purpose=Purpose.TRAIN):
        assert call.adapter_version == rollouts[call.rollout_id or ""].step - 1
    return {(call.adapter, call.adapter_version) for call in run.calls()}


def runners(run: Run, state: AttemptState) -> dict[str, str]:
    """The rollouts that have an attempt in a state, and the runner of the newest one.

    Runners are named by their number, and each asks one gateway.
    """
    with run.store() as store:
        attempts = store.newest_attempts(run.run_id, [state], 1)
    return {rollout.id: one.runner.rpartition("-")[2] for rollout, one in reversed(attempts)}


@starts_vllm
@pytest.mark.parametrize("samplers", [1, 2])
def test_a_run_trains_through_vllm_and_survives_its_death(
    samplers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three versions published; a server is killed in between; every call is accounted for.

    Another server, which another runner asks, gets its rollouts. Then the run need not wait for it.
    """
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    run = Run(
        tmp_path, "slow", sampler="vllm", vllm_python=real_vllm.PYTHON, steps=3, eval_every=9,
        timeout=900, max_tokens=32, samplers=samplers,
    )  # fmt: skip
    log = run.folder.logs / "vllm.log"
    process = run.start()
    try:
        wait_for(lambda: run.steps() and len(runners(run, AttemptState.RUNNING)) == 2, process, 900)
        os.kill(engine(log), signal.SIGKILL)
        run.finish(process, timeout_s=900)
    finally:
        process.kill()  # where it went well, it is over
    assert check_run(run, 3) >= {("policy", version) for version in (0, 1, 2)}
    cut_off, done = runners(run, AttemptState.INFRASTRUCTURE), runners(run, AttemptState.SUCCEEDED)
    if samplers == 1:
        assert log.read_text().count("Started server process") == 2
    else:
        [runner] = {*cut_off.values()}
        assert runner not in {done[rollout] for rollout in cut_off}


@starts_vllm
def test_a_server_that_comes_up_late_gets_rollouts(vllm_url: str, tmp_path: Path) -> None:
    late = real_vllm.server(tmp_path / "vllm.log")
    run = Run(
        tmp_path, "slow", sampler="vllm", vllm_url=f"{vllm_url},{late.url}", vllm_wait=1,
        rank=RANK, steps=1000, eval_every=1000, timeout=900, max_tokens=32,
    )  # fmt: skip
    process = run.start()
    try:
        wait_for(run.steps, process, 900)
        late.start()
        wait_for(lambda: len({*runners(run, AttemptState.SUCCEEDED).values()}) == 2, process, 900)
        process.send_signal(signal.SIGINT)
        run.finish(process, 130, 900)
        run.changes = ["--steps", str(len(run.steps()) + 1)]
        run.finish(timeout_s=900)
    finally:
        process.kill()
        late.stop()
    check_run(run, len(run.steps()))


@starts_vllm
def test_serve_starts_vllm_and_outlives_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters, and an engine that dies: 503, then both answer as before."""
    policies = {"asker": Policy(), "answerer": Policy()}
    for seed, (name, policy) in enumerate(policies.items()):
        policy.become(seed, tmp_path / "adapters" / name)
    settings = flags(
        "serve", port=0, store=tmp_path / "served.db", adapter_path=tmp_path / "adapters",
        sampler="vllm", vllm_python=real_vllm.PYTHON,
    )  # fmt: skip
    log = tmp_path / "served.db.vllm.log"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = subprocess.Popen(
        [*CLI, "serve", *settings],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        while not (found := re.search(r"http://[\d.]+:\d+", server.stdout.readline())):
            assert server.poll() is None
        with httpx.Client(base_url=found[0], timeout=900) as client:
            before = {name: answer_of(client, name, policies[name]) for name in policies}
            assert before["asker"] != pytest.approx(before["answerer"], abs=0.01)
            os.kill(engine(log), signal.SIGKILL)
            until(lambda: client.get("/healthz").status_code == 503, 30)
            refused = client.post("/v1/chat/completions", json=chat("asker"))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "sampler_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
            until(lambda: client.get("/healthz").status_code == 200, 900)
            assert client.get("/healthz").json()["recoveries"] == 1
            after = {name: answer_of(client, name, policies[name]) for name in policies}
            assert after == {name: pytest.approx(was, abs=2e-4) for name, was in before.items()}
        last = engine(log)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130), server.stdout.read()
        until(lambda: not alive(last), 30)
    finally:
        server.kill()
        server.wait(30)
        if server.stdout is not None:
            server.stdout.close()


def chat(model: str) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Who are you?"}]
    shown = {"logprobs": True, "return_token_ids": True}
    return {"model": model, "messages": asked, "max_tokens": 16, "temperature": 0} | shown


def answer_of(client: httpx.Client, model: str, policy: Policy) -> list[float]:
    """Return the log-probs of a greedy answer, which are this policy's."""
    answer = client.post("/v1/chat/completions", json=chat(model))
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = policy.logprobs(answer.json()["prompt_token_ids"], choice["token_ids"])
    assert len(got) >= 5
    assert got == pytest.approx(expected[: len(got)], abs=2e-4)  # a stop token is not shown
    return got


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_two_adapters_train_through_one_vllm(vllm_url: str, tmp_path: Path) -> None:
    run = Run(
        tmp_path, "two_models", adapters="asker,answerer", sampler="vllm", vllm_url=vllm_url,
        rank=RANK, eval_every=9,
    ).finish()  # fmt: skip
    assert check_run(run, 2) >= {(name, v) for name in ("asker", "answerer") for v in (0, 1)}
