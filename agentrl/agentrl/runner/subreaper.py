"""Find and kill processes that an agent leaves behind.

A signal to the attempt's group reaches all but those that made a session of their own (``setsid``,
daemons). On Linux a process that calls ``adopt_orphans`` becomes the parent of every orphan below
it, and ``kill_children`` ends them. Other systems have the group only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PATIENCE_S = 2.0


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill and reap the children of this process, and theirs, except ``keep``.

    Repeats until there are none, because a killed child's children become this process's.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (found := set(_children()).difference(keep)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                    time.sleep(0.002)


def _children() -> list[int]:
    """Return the child processes, dead ones included; [] where the system does not tell."""
    if sys.platform != "linux":
        return []
    try:
        # Far cheaper than a look into /proc, and the usual case: nothing was left behind.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:
        return []
    return [int(pid) for text in lists for pid in text.split()]
