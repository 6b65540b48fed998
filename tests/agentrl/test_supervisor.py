"""A supervised child: forked or executed, started again, and gone when its supervisor is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gateway import until
from runner_harness import alive

from agentrl import supervisor as supervisor_module
from agentrl.supervisor import SupervisedProcess

CHILD = """
import os, sys, time
from agentrl.supervisor import end_with_parent
end_with_parent()
print("executed", os.getpid(), flush=True)
time.sleep(60)
"""
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from agentrl.supervisor import SupervisedProcess, end_with_parent

def serve():
    end_with_parent()
    print("forked", os.getpid(), flush=True)
    time.sleep(60)

log, child = Path(sys.argv[1]), sys.argv[2]
supervised = SupervisedProcess("child", [sys.executable, "-c", child], log)
supervised.spawn(serve).supervise()
sys.stdin.read()  # until we are told to stop
supervised.stop()
print("stopped", flush=True)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    if sys.platform != "linux":
        pytest.skip("forks")
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log"), CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def last_child(log: Path, count: int) -> tuple[str, int]:
    """Wait for a number of children; return how the last one was started, and its pid."""
    until(lambda: log.exists() and log.read_text().count("\n") == count)
    kind, pid = log.read_text().splitlines()[-1].split()
    return kind, int(pid)


def test_it_begins_as_a_fork_and_is_executed_when_that_dies(
    supervisor: subprocess.Popen[str], tmp_path: Path
) -> None:
    kind, first = last_child(tmp_path / "log", 1)
    assert kind == "forked"
    os.kill(first, signal.SIGKILL)
    kind, second = last_child(tmp_path / "log", 2)
    assert (kind, alive(first), alive(second)) == ("executed", False, True)
    out, _ = supervisor.communicate("", timeout=15)
    assert (out, supervisor.returncode) == ("stopped\n", 0)
    until(lambda: not alive(second))
    last_child(tmp_path / "log", 2)  # what is stopped does not come back


def test_a_process_that_cannot_be_started_again_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LONGEST_DELAY_S", 0.1)
    supervised = SupervisedProcess("child", ["sleep", "60"], tmp_path / "log").spawn().supervise()
    first, folder = supervised.pid, tmp_path / "gone"
    supervised.log = folder / "log"  # as where the disk is full
    os.kill(first, signal.SIGKILL)
    until(lambda: supervised.restarts >= 2)
    folder.mkdir()
    until(lambda: supervised.pid != first and alive(supervised.pid))
    supervised.stop()


@pytest.mark.parametrize("after_restart", [False, True])
def test_it_ends_with_its_supervisor(
    supervisor: subprocess.Popen[str], tmp_path: Path, after_restart: bool
) -> None:
    _, pid = last_child(tmp_path / "log", 1)
    if after_restart:
        os.kill(pid, signal.SIGKILL)
        _, pid = last_child(tmp_path / "log", 2)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not alive(pid))


ENDING = """
import signal, time

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a server does that has stopped serving
    print("ending", flush=True)
    time.sleep(0.5)
    raise SystemExit

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""


def test_a_process_that_ends_in_order_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = SupervisedProcess("child", [sys.executable, "-c", ENDING], log).spawn()
    until(lambda: "up" in log.read_text())
    child.begin_stop()
    until(lambda: "ending" in log.read_text())
    child.stop()
    assert child.last_code == 0
