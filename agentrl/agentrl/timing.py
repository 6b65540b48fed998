"""Time: seconds by phase, notices during long waits, and faster imports."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FIRST_NOTICE_S, LONGEST_PAUSE_S = 5.0, 15.0


@dataclass(slots=True)
class PhaseTimer:
    """Wall-clock seconds by phase: ``with timer("rollouts"):`` adds to ``spent["rollouts"]``."""

    spent: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - started

    def add(self, other: PhaseTimer) -> None:
        for phase, seconds in other.spent.items():
            self.spent[phase] = self.spent.get(phase, 0.0) + seconds


class Waiting:
    """A wait that began at construction and is reported while it lasts.

    The first notice goes to ``tell`` after ``first_s`` seconds (default ``FIRST_NOTICE_S``), the
    next ones after pauses that double up to ``LONGEST_PAUSE_S``.
    """

    def __init__(self, tell: Callable[[str], object], first_s: float | None = None) -> None:
        self._tell = tell
        self._began = time.monotonic()
        self._tell_at = FIRST_NOTICE_S if first_s is None else first_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def still(self, notice: Callable[[], str]) -> None:
        """Report ``notice()`` if a notice is due; call this in every round of the wait."""
        if self.seconds >= self._tell_at:
            self._tell(notice())
            self._tell_at = self.seconds + min(self.seconds, LONGEST_PAUSE_S)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Pause the garbage collector around imports that create a million permanent objects.

    Otherwise it traverses them repeatedly while they are created (a fifth of torch's import time),
    in every later full collection, and for a second at exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
