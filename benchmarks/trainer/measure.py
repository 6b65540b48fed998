"""What both sides measure, and how. Plain Python and torch."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path


def _status(field: str) -> float:
    """A size of this process in MB, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


class PeakMemory:
    """How far resident memory rises above what it is now, whatever it has been before."""

    def __init__(self) -> None:
        gc.collect()
        # Loading may have taken more than what is measured: Linux forgets the peak on request.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def megabytes(self) -> float:
        return _status("VmHWM") - self._before


def report(
    forward_backward: Callable[[], None], mean_logprob: float, trained: int, repeats: int
) -> None:
    """Print one line of JSON: the quickest of ``repeats`` after a first one that warms up."""
    memory = PeakMemory()
    forward_backward()
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        forward_backward()
        seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (min(column) for column in zip(*seconds, strict=True))
    print(
        json.dumps(
            {
                "cpu_seconds": cpu,
                "seconds": wall,
                "trained_tokens": trained,
                "mean_logprob": mean_logprob,
                "megabytes_on_top_of_the_model": memory.megabytes(),
            }
        )
    )
