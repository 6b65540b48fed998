"""Follow the runs that pages show: fill their indexes, and tell pages that something is new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from agentrl.history.sources import OpenRun
from agentrl_tracer.store import StoreError

log = logging.getLogger("agentrl")

_PERIOD_S = 1.0
_FORGET_S = 30.0  # without a page that looks
_REST_S = 0.02  # between two steps of filling: a training beside it must not notice


@dataclass
class _Watched:
    run: OpenRun
    looked_at: float = field(default_factory=time.monotonic)
    pages: int = 0
    """Live pages that are open."""
    version: int = 0
    signature: tuple[object, ...] = ()


class Watcher:
    """One thread for all runs, at the lowest priority."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="agentrl-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(5)

    def look_at(self, run: OpenRun) -> None:
        """Follow a run for the next half minute."""
        with self._changed:
            known = self._watched.get(run.name)
            if known is None or known.run is not run:
                self._watched[run.name] = _Watched(run)
                self._changed.notify_all()
            else:
                known.looked_at = time.monotonic()

    async def changes(self, run: OpenRun) -> AsyncIterator[int]:
        """Yield a number that grows whenever the run has something new; ends with the server."""
        self.look_at(run)
        watched = self._watched[run.name]
        watched.pages += 1
        seen = watched.version
        try:
            while not self._ended:
                if watched.version != seen:
                    seen = watched.version
                    yield seen
                await asyncio.sleep(_PERIOD_S / 2)
        finally:
            watched.pages -= 1
            watched.looked_at = time.monotonic()

    def _work(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._changed:
                if not self._ended:
                    self._changed.wait(_PERIOD_S if self._watched else None)
                if self._ended:
                    return
                self._forget()
                watched = list(self._watched.values())
            for one in watched:
                try:
                    self._follow(one)
                except (StoreError, OSError) as error:
                    log.warning("%s: %s", one.run.name, error)
                except Exception:
                    log.exception("indexing %s failed", one.run.name)

    def _forget(self) -> None:
        now = time.monotonic()
        for name, one in list(self._watched.items()):
            if not one.pages and now - one.looked_at > _FORGET_S:
                del self._watched[name]

    def _follow(self, one: _Watched) -> None:
        run = one.run
        began = time.monotonic()
        while run.fill() and not self._ended:
            time.sleep(_REST_S)
            if time.monotonic() - began > _PERIOD_S:  # other runs wait
                break
        signature = (*run.index.signature(), run.store.last_step(run.id), run.current()["state"])
        if signature != one.signature:
            one.signature = signature
            one.version += 1
