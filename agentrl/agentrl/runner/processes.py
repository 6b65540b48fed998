"""Fork processes, talk to them over a socket, and kill them and what they leave behind.

A signal to an agent's process group reaches all but those that made a session of their own
(``setsid``, daemons). On Linux a process that calls ``adopt_orphans`` becomes the parent of every
orphan below it, and ``kill_children`` ends them. Other systems have the group only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from agentrl.runner.protocol import send

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PATIENCE_S = 2.0


class ForkedChild:
    """A fork of this process. Each side notices at its end of the socket when the other dies.

    Args:
        run: what the child does with its end.
        siblings: connections of this process, which the child must not keep open.

    Raises:
        OSError: out of processes or descriptors.
    """

    def __init__(
        self,
        run: Callable[[socket.socket], NoReturn],
        siblings: Iterable[socket.socket | Connection] = (),
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self.started = time.monotonic()
        self.alive = True
        self._received = b""
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for ours in (self.socket, *siblings):
                    ours.close()
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.close(nothing)
                run(theirs)
            finally:
                os._exit(127)
        theirs.close()

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Send a message, with a descriptor; raise ``OSError`` if the process has died."""
        if descriptor is not None:  # it comes with the first byte
            socket.send_fds(self.socket, [b"\n"], [descriptor])
        send(self.socket.fileno(), message)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come; by the end ``alive`` is known.

        A grandchild may hold the socket open, so its end is not the only sign of a death.
        """
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        self.alive = self._status is None
        try:
            while chunk := self.socket.recv(65536, socket.MSG_DONTWAIT):
                self._received += chunk
            self.alive = False
        except BlockingIOError:
            pass
        except ConnectionError:
            self.alive = False
        *lines, self._received = self._received.split(b"\n")
        yield from map(json.loads, lines)

    def signal(self, number: int) -> None:
        """Signal the process, and its process group if it leads one."""
        for kill in (os.killpg, os.kill):
            # No such group: setsid() has not run yet, or the group is gone. (macOS says
            # "permission denied" for a group of zombies.)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, number)
                break

    def kill(self) -> int:
        """Kill and reap the process; return its exit code, negative for a signal."""
        self.signal(signal.SIGKILL)
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        self.socket.close()
        return os.waitstatus_to_exitcode(self._status)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill and reap the children of this process, and theirs, except ``keep``.

    Repeats until there are none, because a killed child's children become this process's.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (found := _children().difference(keep)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                    time.sleep(0.002)


def _children() -> set[int]:
    """Return the child processes, dead ones included; none where the system does not tell."""
    if sys.platform != "linux":
        return set()
    # ChildProcessError is the usual case, nothing was left behind, and far cheaper than /proc.
    with contextlib.suppress(OSError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
        return {int(pid) for text in lists for pid in text.split()}
    return set()
