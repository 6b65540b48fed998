"""What has to be looked after while the trainer waits: leases that ran out, runners that died.

Knows the store's leases and the pool of runners; not what is waited for. There is no thread:
whoever waits calls ``look`` now and then, or waits by ``result``.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

from agentrl_tracer.store import Store

T = TypeVar("T")

_SWEEP_S = 0.5  # between looks for expired leases


class Runners(Protocol):
    """A pool of runners."""

    def alive(self) -> bool: ...
    def restart(self) -> None: ...


class Upkeep:
    def __init__(self, store: Store, runners: Runners) -> None:
        self._store = store
        self._runners = runners
        self._next_sweep = 0.0

    def look(self) -> None:
        """Often called, seldom does anything."""
        if time.monotonic() >= self._next_sweep:
            self._store.expire_leases()
            self._next_sweep = time.monotonic() + _SWEEP_S
        if not self._runners.alive():
            self._runners.restart()

    def result(self, future: Future[T]) -> T:
        """What the trainer's other thread computes. Meanwhile runners may be at work on the next
        steps' rollouts, and what a dead one had leased is to be run by another."""
        while not wait([future], timeout=_SWEEP_S).done:
            self.look()
        return future.result()
