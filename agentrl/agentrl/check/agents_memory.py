"""Measure the memory of the processes that run the agents."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil

_LOOK_S = 0.3


class AgentsMemory:
    """The most memory that a pool of runners has at a time while the block runs.

    Attributes:
        peak: bytes of the pool and all processes below it, agents' own commands included. What
            processes share counts once.
    """

    def __init__(self, pool: int | None) -> None:
        """``pool``: the process's id; None: it is not on this machine, and the peak stays 0."""
        self.peak = 0
        self._pool = None if pool is None else psutil.Process(pool)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agents-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._pool is not None:
            self.peak = max(self.peak, _held_below(self._pool))
            if self._ended.wait(_LOOK_S):
                return


def _held_below(pool: psutil.Process) -> int:
    try:
        return sum(map(_held_by, [pool, *pool.children(recursive=True)]))
    except psutil.NoSuchProcess:
        return 0


def _held_by(process: psutil.Process) -> int:
    """Return the bytes of a process, its share of what it shares; 0 if it has ended.

    Runners hide theirs (``hide_memory``). Without root, such a fork counts with what it has beyond
    its parent.
    """
    try:
        held = process.memory_full_info()
        return getattr(held, "pss", held.uss)  # macOS knows no pss
    except psutil.AccessDenied:
        return _beyond_its_parent(process)
    except psutil.NoSuchProcess:
        return 0


def _beyond_its_parent(process: psutil.Process) -> int:
    try:
        parent = process.parent()
        return max(0, process.memory_info().rss - (parent.memory_info().rss if parent else 0))
    except psutil.Error:
        return 0
