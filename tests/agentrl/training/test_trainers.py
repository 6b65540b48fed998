"""``--trainers 2``: a run with its own loss, the death of a rank, and what goes on after it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from settings import nested
from training_run import SUPPORT, Run, hello, wait_for

from agentrl.config.commands import TrainConfig
from agentrl_trainer.client import ServiceClient

LOSS = """
def loss(tokens):
    return -tokens.advantages * tokens.log_ratio.exp()
"""


AGENT = f"""
import sys, time
from pathlib import Path

sys.path.append({str(SUPPORT)!r})
from train_agents import mixed

def agent(task):
    mixed(task)
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.1)
"""

ACTORS = {"ray::_Actor", "ray::_RayRunner"}
"""A trainer, and a runner."""


def names(of: psutil.Process) -> str:
    """Return the names of all processes below one, as one text."""
    found = list[str]()
    for process in of.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.name())
    return " ".join(found)


def followers(run: Run) -> list[int]:
    found, mark = list[int](), f"TEST_RUN={run.folder.root}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found += [int(process.name)] * (
                    "distributed.follower" in (process / "cmdline").read_text()
                )
    return found


def test_a_run_ends_with_its_rank_and_goes_on_with_a_sharded_base(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    (tmp_path / "agent.py").write_text(AGENT)
    hold, agent = tmp_path / "hold", f"{tmp_path / 'agent.py'}:agent"
    run = Run(tmp_path, agent, trainers=2, steps=5, loss=f"{tmp_path / 'own.py'}:loss")
    process = run.start()
    wait_for(run.steps, process, 120)
    hold.touch()
    time.sleep(3)  # an update that had begun ends
    [follower] = followers(run)
    os.kill(follower, signal.SIGKILL)
    run.finish(process, code=1, timeout_s=60)  # its rollouts would not end
    hold.unlink()
    assert "rank 1 of 2 ended: it was killed by signal 9" in run.output
    assert f"continue with --resume {run.folder.root}" in run.output
    assert "Traceback" not in run.output
    assert run.processes() == []
    run.changes = ["--trainers", "3", "--shard-base"]
    run.finish()
    assert "learning.shard_base" in run.output
    said = "was computed with learning.trainers 2, the next ones with 3: "
    assert said in " ".join(run.output.split())
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4, 5]
    assert all(row["tokens/trained"] > 0 for row in run.steps())
    assert run.accounting().adds_up
    assert run.processes() == []


def by_command(_: Path) -> None:
    settings = {"agent": "a.py:a", "tasks": "t", "model": "agentrl-tiny", "load_in_4bit": True}
    TrainConfig.model_validate(nested(**settings, trainers=2, shard_base=True))


def by_client(folder: Path) -> None:
    ranks = {"size": 2, "shard": True}
    with ServiceClient(folder=folder, device="cpu", load_in_4bit=True, trainers=ranks) as service:
        service.create_lora_training_client("agentrl-tiny", rank=4)


@pytest.mark.parametrize("way", [by_command, by_client])
def test_a_base_in_4_bits_is_not_spread(way: Callable[[Path], None], tmp_path: Path) -> None:
    said = "learning.shard_base: not with model.load_in_4bit, .* leave one of them out"
    with pytest.raises(ValueError, match=said):
        way(tmp_path)


@pytest.mark.timeout(400)
def test_hello_is_learned_with_trainers_and_runners_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = hello(tmp_path, trainers="ray:2", runners="ray:4")
    process = run.start()
    of_run = psutil.Process(process.pid)
    wait_for(lambda: all(name in names(of_run) for name in ACTORS), process, 120)
    assert followers(run) == []
    run.finish(process)
    assert run.accounting().adds_up
    assert run.folder.read_metrics()[-1]["eval/accuracy"] == 1.0
    assert run.processes() == []
