"""What the processes that run agents take, measured on real ones."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from agentrl.check import agents_memory
from agentrl.check.agents_memory import AgentsMemory

MB = 10**6
POOL = """
import os, sys
shared = b"x" * 200_000_000
for _ in range(2):
    if os.fork() == 0:
        own = b"y" * 50_000_000
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
        sys.stdin.read()
        os._exit(0)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what forks share is not known")
@pytest.mark.parametrize("hidden", [False, True])
def test_what_processes_share_counts_once(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forks of 50 MB beside 200 MB that they share with their parent."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    if hidden:  # as without root, from forks of what hides its memory
        monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
        monkeypatch.setattr(agents_memory, "_LOOK_S", 0.05)
    with subprocess.Popen(
        [sys.executable, "-c", POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as pool:
        assert pool.stdin is not None
        assert pool.stdout is not None
        for _ in range(2):
            assert pool.stdout.readline() == b"ready\n"
        with AgentsMemory(lambda: pool.pid) as held:
            pass
        pool.stdin.close()
    own, shared = 2 * 50 * MB, 200 * MB
    assert own * 0.9 <= held.peak <= own + shared + 60 * MB
    assert hidden or held.peak >= own + shared


@pytest.mark.parametrize("pool", [None, 2**22 + 1])
def test_a_pool_elsewhere_or_gone_is_not_measured(pool: int | None) -> None:
    with AgentsMemory(lambda: pool) as held:
        pass
    assert held.peak == 0


def test_what_agents_share_counts_once() -> None:
    held = AgentsMemory(lambda: None)
    held.idle, held.peak = 60, 160
    assert held.of(8, measured=4) == 260
