"""CPU cores: how many this process may use, and how many threads sampler and trainer compute with.

In a synchronous run the sampler rests while the trainer updates, so each may use all cores. Where
both are busy at once (``max_staleness``), they share: two threads of one computation that wait for
a core which another process keeps are slower than one.
"""

from __future__ import annotations

import os
from pathlib import Path

_WORTH_THREADS = 20_000_000
"""Parameters of a model below which a second thread costs more than it computes."""


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, its container, OMP_NUM_THREADS."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:  # macOS
        count = os.cpu_count() or 1
    limits = [count]
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal():
        limits.append(int(asked))
    try:  # "max 100000", or microseconds in a period
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limits.append(-(-int(quota) // int(period)))
    except (OSError, ValueError):  # no limit, or no cgroups (version 2)
        pass
    return max(1, min(limits))


def trainer_threads(cores: int, parameters: int, *, alone: bool) -> int:
    """Return the threads of an update; ``alone``: the sampler rests meanwhile."""
    if parameters < _WORTH_THREADS:
        return 1
    return cores if alone else max(1, cores // 2)


def sampler_threads(cores: int, parameters: int, *, alone: bool) -> int:
    """Return the threads of a sampler; ``alone``: no trainer computes beside it.

    From four cores on, a quarter is left to the agents and the gateway's other threads.
    """
    if parameters < _WORTH_THREADS:
        return 1
    return max(1, cores - cores // 4 if alone else cores // 2)
