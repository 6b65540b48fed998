"""Sample the proportional memory (PSS) of a tree of processes, on Linux."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Self


class TreeMemory:
    """PSS of the processes below one, twice a second while this context is open."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.samples: list[dict[int, float]] = []
        """MB by process, at each time."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self, pids: Collection[int] | None = None, besides: Collection[int] = ()) -> float:
        """Return the most MB that these processes, or all, had together at one time."""
        return max(
            (
                sum(mb for pid, mb in one.items() if pid in (pids or one) and pid not in besides)
                for one in self.samples
            ),
            default=0.0,
        )

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            self.samples.append({pid: _pss(pid) for pid in _below(self._root)})


def _below(root: int) -> set[int]:
    """Return a process's descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found, new = set[int](), {root}
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def _pss(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
