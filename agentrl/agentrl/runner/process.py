"""One attempt, in a process of its own: the worker's side.

Knows forking, pipes, process groups and signals. Does not know the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from agentrl.runner.attempt import Job, Report, run_attempts
from agentrl.runner.config import RunnerConfig
from agentrl.runner.external_python import become

logger = logging.getLogger("agentrl.runner")

_CHUNK = 65536


def fork_attempts(
    config: RunnerConfig,
    lines: bytes,
    run: Callable[[int, int], NoReturn],
    foreign_fds: Iterable[int],
) -> tuple[int, int, int]:
    """Forks a process that runs attempts; returns its pid, and our ends of its pipes.

    Args:
        lines: what another interpreter, if one is configured, gets on its standard input.
        run: what the child does otherwise, given its ends: for reports, and of the leash.
        foreign_fds: our own descriptors, which the child must not keep open.

    Raises:
        OSError: out of processes or descriptors.
    """
    report_read, report_write = os.pipe()
    leash_read, leash_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError:
        for fd in (report_read, report_write, leash_read, leash_write):
            os.close(fd)
        raise
    if pid == 0:
        # The worker must stay the only holder of these ends: closing is how they speak.
        for fd in (report_read, leash_write, *foreign_fds):
            os.close(fd)
        if config.python is None:
            run(report_write, leash_read)
        try:
            become(config.python, lines, report_write, leash_read)
        finally:
            os._exit(127)
    os.close(report_write)
    os.close(leash_read)
    os.set_blocking(report_read, False)
    return pid, report_read, leash_write


class AttemptProcess:
    """A forked attempt: watch ``report_fd``, call ``poll`` when it is readable or time has passed.

    The process may serve further attempts, ``config.rollouts_per_process`` in all, as long as they
    end well: while ``reusable``, ``run_next`` starts one.

    Args:
        job: the first attempt.
        foreign_fds: the worker's own descriptors, which the child must not keep open.
    """

    def __init__(
        self,
        config: RunnerConfig,
        job: Job,
        known_modules: frozenset[str],
        foreign_fds: Iterable[int] = (),
    ) -> None:
        self.pid, self.report_fd, self._leash_fd = fork_attempts(
            config,
            config.to_json().encode() + b"\n" + job.to_line(),
            lambda report, leash: run_attempts(config, job, report, leash, known_modules),
            foreign_fds,
        )
        self._received = bytearray()
        self.report: Report | None = None
        self.reusable = False
        self._further = config.rollouts_per_process - 1
        self.status: int | None = None  # as ``waitstatus_to_exitcode``; None while it runs

    def poll(self) -> bool:
        """True when the attempt is over; by then nothing of its process group is left."""
        if self.status is not None:
            return True
        ended = self._read_report()
        if not ended:
            # A grandchild may hold the pipe open, so its end is not the only sign.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:
                return False
            self._read_report()
            self._kill_group(signal.SIGKILL)
            self._over(status)
            return True
        # Its last word is spoken and everything is flushed: nothing is lost by SIGKILL. While the
        # child is not reaped its pid, our name for the group, cannot be anybody else's.
        if self.report is not None:
            if self._further and self.report.ok and not self.report.incomplete:
                self.status = 0
                self.reusable = True
                return True
            self._kill_group(signal.SIGKILL)
            self._over(os.waitpid(self.pid, 0)[1])
            return True
        pid, status = _wait(self.pid, 0.5)
        self._kill_group(signal.SIGKILL)
        self._over(status if pid else os.waitpid(self.pid, 0)[1])
        return True

    def run_next(self, job: Job) -> None:
        """Hands a further attempt to the process.

        Raises:
            OSError: the process has died meanwhile.
        """
        self._further -= 1
        self.reusable, self.status, self.report = False, None, None
        self._received.clear()
        os.write(self._leash_fd, job.to_line())

    def signal(self, number: int) -> None:
        """Signals every process of the attempt."""
        if self.status is None:
            self._kill_group(number)

    def kill(self) -> None:
        """Ends it now."""
        if self.status is None or self.reusable:
            self.reusable = False
            self._kill_group(signal.SIGKILL)
            self._over(os.waitpid(self.pid, 0)[1])

    def _kill_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # No such group: it has not come as far as setsid(), or it is gone. (macOS says
            # "permission denied" for a group of zombies.)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _over(self, status: int) -> None:
        self.status = os.waitstatus_to_exitcode(status)
        os.close(self.report_fd)
        os.close(self._leash_fd)

    def _read_report(self) -> bool:
        """True when the report is complete, or none will come."""
        while True:
            try:
                chunk = os.read(self.report_fd, _CHUNK)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._received += chunk
            if self._received.endswith(b"\n"):
                self.report = Report(**json.loads(self._received))
                return True


def _wait(pid: int, timeout_s: float) -> tuple[int, int]:
    """``waitpid`` with patience: the pipe closes a moment before the process is gone."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = os.waitpid(pid, os.WNOHANG)
        if found[0] or time.monotonic() > deadline:
            return found
        time.sleep(0.002)
