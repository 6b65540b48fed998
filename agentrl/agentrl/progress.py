"""Saying, now and then, what is being waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S, MOST_S = 5.0, 15.0


class Waiting:
    """A wait that began now. If it takes long ``tell`` hears of it, less and less often: after
    ``first_s`` seconds, twice as many, and so on, but every ``MOST_S`` at least."""

    def __init__(self, tell: Callable[[str], object], first_s: float | None = None) -> None:
        self._tell = tell
        self._began = time.monotonic()
        self._tell_at = FIRST_S if first_s is None else first_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def still(self, what: Callable[[], str]) -> None:
        """It goes on. ``what`` is asked only when it is to be told."""
        if self.seconds >= self._tell_at:
            self._tell(what())
            self._tell_at = self.seconds + min(self.seconds, MOST_S)
