"""Time: seconds and busy cores by phase, notices during long waits, and faster imports."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

_OPENMP = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "0"}
"""For GNU's and Intel's libraries: rounds, and milliseconds, that a waiting thread stays awake."""

FIRST_NOTICE_S, LONGEST_PAUSE_S = 5.0, 15.0


@dataclass(slots=True)
class PhaseTimer:
    """Wall-clock seconds by phase: ``with timer("rollouts"):`` adds to ``spent["rollouts"]``."""

    spent: dict[str, float] = field(default_factory=dict[str, float])
    busy: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds that cores of this machine were busy meanwhile, whatever they computed."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started, busy = time.perf_counter(), busy_core_seconds()
        try:
            yield
        finally:
            self.add_phase(phase, time.perf_counter() - started, busy_core_seconds() - busy)

    def add(self, other: PhaseTimer) -> None:
        for phase, seconds in other.spent.items():
            self.add_phase(phase, seconds, other.busy[phase])

    def add_phase(self, phase: str, seconds: float, busy: float) -> None:
        """Add seconds, and those that cores were busy meanwhile, to a phase."""
        self.spent[phase] = self.spent.get(phase, 0.0) + seconds
        self.busy[phase] = self.busy.get(phase, 0.0) + busy

    def shares(self) -> dict[str, float]:
        """Return the share of the machine's cores that were busy in each timed phase, 0 to 1."""
        cores = psutil.cpu_count() or 1
        whole = {phase: self.spent[phase] * cores for phase in self.busy}
        return {p: min(1.0, self.busy[p] / of) for p, of in whole.items() if of}


def busy_core_seconds() -> float:
    """Return the seconds that this machine's cores have been busy, summed, since it started."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "irq", 0.0)


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
    """Import torch and what needs it: pause the garbage collector, and let its threads wait asleep.

    The imports create a million permanent objects. The collector would traverse them repeatedly
    while they are created (a fifth of torch's import time), in every later full collection, and for
    a second at exit.

    OpenMP reads how its threads wait when torch loads it. By default they keep a core busy while
    they wait for a thread whose core an agent has, which makes two threads slower than one.
    """
    unset = _OPENMP.keys() - os.environ.keys()
    os.environ.update({name: _OPENMP[name] for name in unset})
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in unset:  # agents and vLLM inherit the environment
            del os.environ[name]
