"""Which sessions are alive: a session lasts as long as something is heard from it.

Knows session ids and a clock, nothing of what sessions have. The SDK sends a heartbeat every ten
seconds, and anything else that names the session counts as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Leases:
    """``seconds`` of silence end a session."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock  # monotonic: a laptop that slept has not been silent
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}

    def renew(self, session: str) -> None:
        """Something was heard. A session that is not known begins, or begins again."""
        with self._lock:
            self._heard[session] = self._clock()

    def end(self, session: str) -> None:
        with self._lock:
            self._heard.pop(session, None)

    def alive(self, session: str) -> bool:
        return session in self._heard

    def take_silent(self) -> list[str]:
        """The sessions whose time is over; they are ended with this."""
        with self._lock:
            now = self._clock()
            silent = [s for s, heard in self._heard.items() if now - heard > self.seconds]
            for session in silent:
                del self._heard[session]
            return silent
