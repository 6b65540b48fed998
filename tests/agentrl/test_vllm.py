"""``--sampler vllm``: its settings, its process, and a whole run of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import ConfigError, ServeConfig
from agentrl.run_folder import RunFolder
from agentrl.vllm_server import planned_server, vllm_settings
from agentrl_tracer.store import Store
from vllm_environment import VLLM_PYTHON

ROOT = Path(__file__).parents[2]


def config(**settings: Any) -> ServeConfig:
    return ServeConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"vllm_url": "http://gpu:8000"}, 'without sampler = "vllm"'),
        ({"sampler": "vllm", "vllm_url": "gpu:8000"}, "vllm_url"),
        ({"sampler": "vllm", "vllm_url": "http://gpu:8000", "vllm_args": "-x"}, "runs already"),
        ({"sampler": "vllm", "vllm_key_env": "HOME"}, "needs no key"),
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
        vllm_settings(settings, 8)
    adapter = {"max_rank": None}
    assert planned_server(config(), tmp_path, **adapter) is None
    elsewhere = config(sampler="vllm", vllm_url="http://gpu:8000")
    assert planned_server(elsewhere, tmp_path, **adapter) is None


# Starts a process of its own, as vLLM does, says which, and ignores polite requests.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["told", "orphaned"])
def test_the_server_ends_with_us_whatever_it_wants(how: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _STUBBORN, "--uds", str(tmp_path / "socket")]
    leash = subprocess.Popen(
        [sys.executable, "-m", "agentrl.vllm_server", *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert leash.stdout is not None
    assert leash.stdin is not None
    grandchild = int(leash.stdout.readline())
    if how == "told":
        leash.terminate()
    else:
        leash.stdin.close()
    assert leash.wait(30) != 0
    wait_for(lambda: not alive(grandchild))
    leash.stdout.close()
    if how == "told":
        leash.stdin.close()


# Answers like a server whose engine dies after two questions, and then waits for ever.
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


def test_a_server_without_its_engine_is_ended(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _BEREFT, "--uds", str(tmp_path / "socket")]
    leash = subprocess.Popen(
        [sys.executable, "-m", "agentrl.vllm_server", *argv], stdin=subprocess.PIPE
    )
    assert leash.wait(60) == 128 + signal.SIGKILL
    assert leash.stdin is not None
    leash.stdin.close()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_for(what: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.vllm
@pytest.mark.timeout(2000)
@pytest.mark.skipif(not VLLM_PYTHON, reason="AGENTRL_TEST_VLLM_PYTHON names no interpreter")
def test_a_run_trains_through_vllm_and_survives_its_death(tmp_path: Path) -> None:
    """Three versions published; the server is killed in between; every call is accounted for."""
    hello = ROOT / "examples/hello"
    argv = [sys.executable, "-m", "agentrl.cli", "train", str(hello / "agent.py") + ":agent"]
    settings = {
        "tasks": hello / "train.jsonl",
        "runs": tmp_path,
        "name": "run",
        "sampler": "vllm",
        "vllm_python": VLLM_PYTHON,
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "runners": 2,
        "timeout": 900,
        "max_tokens": 32,
    }
    for name, value in settings.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    folder = RunFolder(tmp_path / "run")
    log = folder.logs / "vllm.log"
    try:
        wait_for(lambda: run.poll() is not None or trained(folder), 900)
        if run.poll() is None:
            os.kill(engine(log), signal.SIGKILL)
        output = run.communicate(timeout=900)[0]
    finally:
        run.kill()  # where it went well, it is over
    assert run.returncode == 0, output
    assert log.read_text().count("Started server process") == 2
    rows = [row for row in folder.read_metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["sampler_trainer/max_logprob_difference"] < 1e-3 for row in rows)
    store = Store(str(folder.store))
    run_id = folder.run_id.read_text()
    assert store.accounting(run_id).adds_up
    rollouts = [rollout.id for rollout in store.rollouts(run_id)]
    versions = {call.adapter_version for call in store.calls(rollout_ids=rollouts)}
    store.close()
    assert versions == {0, 1, 2}
    assert json.loads(folder.summary.read_text())["calls"]["adds_up"]


def trained(folder: RunFolder) -> bool:
    return any("reward/mean" in row for row in folder.read_metrics())


def engine(log: Path) -> int:
    """The process id of the engine that the server's log names last."""
    return int(log.read_text().rpartition("(EngineCore pid=")[2].partition(")")[0])
