"""CPU-seconds of a process with all its descendants, from /proc (Linux). Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """Of ``root`` and its descendants, those that have ended and been waited for included."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name, which may hold spaces) state ppid ... utime stime cutime cstime
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(used.get(pid, 0.0) for pid in family)
