"""Measure the memory of the processes that run the agents."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil

_LOOK_S = 0.3


class AgentsMemory:
    """The most memory that a pool of runners has at a time while the block runs.

    Attributes:
        idle: bytes of the pool and all processes below it as the block began. What processes share
            counts once.
        peak: the most of them, agents' own commands included.
    """

    def __init__(self, pool: Callable[[], int | None]) -> None:
        """``pool`` gives the process's id; None: it is not on this machine, and takes 0 bytes."""
        self._pool = pool
        self.idle = self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agents-memory", daemon=True)

    def __enter__(self) -> Self:
        self.idle = self.peak = _held_below(self._pool())
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def of(self, agents: int, *, measured: int) -> int:
        """Return the bytes of the pool with so many agents at a time, of which some ran."""
        return self.idle + (self.peak - self.idle) * agents // measured

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.peak = max(self.peak, _held_below(self._pool()))


def _held_below(pool: int | None) -> int:
    if pool is None:
        return 0
    try:
        first = psutil.Process(pool)
        return sum(map(_held_by, [first, *first.children(recursive=True)]))
    except psutil.Error:
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
