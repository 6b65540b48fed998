"""A supervised child: forked or executed, started again, and gone when its supervisor is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
supervised = SupervisedProcess("child", [sys.executable, "-c", child], log, fork=serve)
print("up", flush=True)
sys.stdin.read()  # until we are told to stop
supervised.stop()
print("stopped", flush=True)
"""


class Started:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(log), CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def children(self) -> list[tuple[str, int]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(kind, int(pid)) for kind, pid in map(str.split, lines)]


def until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    if sys.platform != "linux":
        pytest.skip("forks, and reads /proc")
    started = Started(tmp_path / "child.log")
    with started.process:
        yield started
        started.process.kill()


def test_it_begins_as_a_fork_and_is_executed_when_that_dies(started: Started) -> None:
    until(lambda: len(started.children()) == 1)
    [(kind, first)] = started.children()
    assert kind == "forked"
    os.kill(first, signal.SIGKILL)
    until(lambda: len(started.children()) == 2)
    kind, second = started.children()[1]
    assert (kind, gone(first), gone(second)) == ("executed", True, False)
    out, _ = started.process.communicate("", timeout=15)
    assert (out, started.process.returncode) == ("stopped\n", 0)
    until(lambda: gone(second))
    assert len(started.children()) == 2  # what is stopped does not come back


@pytest.mark.parametrize("after_restart", [False, True])
def test_it_ends_with_its_supervisor(started: Started, after_restart: bool) -> None:
    until(lambda: len(started.children()) == 1)
    if after_restart:
        os.kill(started.children()[0][1], signal.SIGKILL)
        until(lambda: len(started.children()) == 2)
    pid = started.children()[-1][1]
    started.process.kill()
    started.process.wait()
    until(lambda: gone(pid))
