"""CPU time and memory of a server with all its descendants, read from /proc.

Knows /proc. Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int(_stat(int(folder.name))[1])
                children.setdefault(parent, []).append(int(folder.name))

    def walk(one: int) -> Iterator[int]:
        yield one
        for child in children.get(one, ()):
            yield from walk(child)

    return list(walk(pid))


def cpu_seconds(pids: list[int]) -> float:
    """utime + stime, of children that have ended too."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(int(field) for field in _stat(pid)[11:15])
    return ticks * _TICK


def rss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def when_quiet(pids: list[int], patience_s: float) -> float:
    """CPU seconds once nothing is left to do: some servers work on after they have answered."""
    end = time.monotonic() + patience_s
    before = cpu_seconds(pids)
    while True:
        time.sleep(0.1)
        now = cpu_seconds(pids)
        if now - before <= _TICK or time.monotonic() > end:
            return now
        before = now


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (state) on; the second may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
