"""Sessions of the SDK's clients: each lives as long as requests of it arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Sessions:
    """A session ends after ``seconds`` of silence; the SDK sends a heartbeat every ten."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock  # monotonic: a suspended machine's sessions have not been silent
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}

    def renew(self, session: str) -> None:
        """Note a request of a session. A session that is unknown begins, or begins again."""
        with self._lock:
            self._heard[session] = self._clock()

    def end(self, session: str) -> None:
        with self._lock:
            self._heard.pop(session, None)

    def alive(self, session: str) -> bool:
        return session in self._heard

    def take_silent(self) -> list[str]:
        """End the sessions that have been silent for too long, and return them."""
        with self._lock:
            now = self._clock()
            silent = [s for s, heard in self._heard.items() if now - heard > self.seconds]
            for session in silent:
                del self._heard[session]
            return silent
