"""A supervised child: forked or executed, started again, and gone when its supervisor is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_gateway import until
from runner_harness import alive

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
Children = Callable[[int], list[tuple[str, int]]]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    if sys.platform != "linux":
        pytest.skip("forks")
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log"), CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def children(tmp_path: Path) -> Children:
    """Waits for a number of children, and returns how each was started, and its pid."""

    def wait_for(count: int) -> list[tuple[str, int]]:
        log = tmp_path / "log"
        until(lambda: log.exists() and log.read_text().count("\n") == count)
        return [(kind, int(pid)) for kind, pid in map(str.split, log.read_text().splitlines())]

    return wait_for


def test_it_begins_as_a_fork_and_is_executed_when_that_dies(
    supervisor: subprocess.Popen[str], children: Children
) -> None:
    [(kind, first)] = children(1)
    assert kind == "forked"
    os.kill(first, signal.SIGKILL)
    kind, second = children(2)[1]
    assert (kind, alive(first), alive(second)) == ("executed", False, True)
    out, _ = supervisor.communicate("", timeout=15)
    assert (out, supervisor.returncode) == ("stopped\n", 0)
    until(lambda: not alive(second))
    children(2)  # what is stopped does not come back


@pytest.mark.parametrize("after_restart", [False, True])
def test_it_ends_with_its_supervisor(
    supervisor: subprocess.Popen[str], children: Children, after_restart: bool
) -> None:
    [(_, pid)] = children(1)
    if after_restart:
        os.kill(pid, signal.SIGKILL)
        _, pid = children(2)[1]
    supervisor.kill()
    supervisor.wait()
    until(lambda: not alive(pid))
