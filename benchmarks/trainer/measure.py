"""What both sides measure, and how. Plain Python and torch."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable


def megabytes() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(
    forward_backward: Callable[[], None], mean_logprob: float, trained: int, repeats: int
) -> None:
    """Print one line of JSON: the quickest of ``repeats`` after a first one that warms up."""
    before = megabytes()
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
                "megabytes_on_top_of_the_model": megabytes() - before,
            }
        )
    )
