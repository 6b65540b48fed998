"""Follow the runs that pages show: fill their indexes, and tell pages that something is new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.history.sources import OpenRun
from agentrl_tracer.store import StoreError

log = logging.getLogger("agentrl")

_PERIOD_S = 1.0
_TICK_S = 0.1
_FORGET_S = 30.0  # without a page that looks
_REST_S = 0.02  # between two steps of filling: a training beside it must not notice


@dataclass
class _Watched:
    run: OpenRun
    looked_at: float = field(default_factory=time.monotonic)
    signature: tuple[object, ...] = ()
    """Differs whenever the run has something new."""
    overview: dict[str, Any] = field(default_factory=dict)
    overview_of: tuple[object, ...] = ()  # the signature that it was made at
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def version(self) -> str:
        """The signature in short, for the link of a page; empty before it is known."""
        return f"{zlib.crc32(repr(self.signature).encode()):x}" if self.signature else ""


class Watcher:
    """One thread for all runs, at the lowest priority."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="agentrl-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End ``changes`` and the thread soon."""
        self._ended.set()

    def stop(self) -> None:
        self.end()
        self._thread.join(5)

    def look_at(self, run: OpenRun) -> _Watched:
        """Follow a run for the next half minute."""
        known = self._watched.setdefault(run.name, _Watched(run))
        if known.run is not run:  # it was opened again
            known.run.close()
        known.run, known.looked_at = run, time.monotonic()
        return known

    def overview(self, run: OpenRun, make: Callable[[OpenRun], dict[str, Any]]) -> dict[str, Any]:
        """Return ``make(run)``, made once for all pages that follow a run, until it changes."""
        known = self._watched.get(run.name)
        if known is None or known.run is not run or not known.signature:
            return make(run)
        with known.lock:
            if known.overview_of != (now := known.signature):
                known.overview, known.overview_of = make(run), now
            return known.overview

    async def changes(self, run: OpenRun, seen: str = "") -> AsyncIterator[None]:
        """Yield whenever the run has something new since the version ``seen``, which a page shows;
        ends with the server."""
        known = self.look_at(run)
        while not self._ended.is_set():
            known = self._watched.setdefault(run.name, known)  # forgotten while the machine slept
            known.looked_at = time.monotonic()
            if known.signature and known.version != seen:
                seen = known.version
                yield
                await self._rest(2 * _PERIOD_S)  # what comes meanwhile is told afterwards
            await self._rest(_PERIOD_S / 2)

    async def _rest(self, seconds: float) -> None:
        """Sleep, no longer than until the end."""
        for _ in range(max(1, round(seconds / _TICK_S))):
            if not self._ended.is_set():
                await asyncio.sleep(_TICK_S)

    def _work(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._ended.wait(_PERIOD_S):
            for name, one in list(self._watched.items()):
                if time.monotonic() - one.looked_at > _FORGET_S:
                    del self._watched[name]
                    continue
                try:
                    self._follow(one)
                except (StoreError, OSError) as error:
                    log.warning("%s: %s", name, error)
                except Exception:
                    log.exception("indexing %s failed", name)

    def _follow(self, one: _Watched) -> None:
        run, began = one.run, time.monotonic()
        while run.fill() and not self._ended.wait(_REST_S):
            if time.monotonic() - began > _PERIOD_S:  # other runs wait
                break
        signature = run.index.signature(), run.store.last_step(run.id), run.current()["state"]
        one.signature = signature
