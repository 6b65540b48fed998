"""Fork the process that runs an agent, watch it, and kill it: the worker's side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from agentrl.runner.agent_process.attempt import run_attempts
from agentrl.runner.agent_process.external_python import become
from agentrl.runner.protocol import AttemptEnding, AttemptJob, AttemptReport, RunnerConfig
from agentrl_tracer.schemas import AttemptState

_CHUNK = 65536
_EXIT_S = 0.5  # the report pipe closes a moment before the process is gone


def fork_agent_process(
    config: RunnerConfig,
    lines: bytes,
    run: Callable[[int, int], NoReturn],
    close_fds: Iterable[int],
) -> tuple[int, int, int]:
    """Fork a process that runs attempts; return its pid, and our ends of report pipe and leash.

    Args:
        lines: standard input of another interpreter, if one is configured.
        run: what the child does otherwise, given its ends of report pipe and leash.
        close_fds: descriptors of this process that the child must not keep open.

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
        # The worker must stay the only holder of these ends: closing them is a message.
        for fd in (report_read, leash_write, *close_fds):
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

    The process may run further attempts, ``config.rollouts_per_process`` in all, as long as they
    end well: while ``reusable``, ``run_next`` starts one.

    Args:
        job: the first attempt.
        close_fds: the worker's own descriptors, which the child must not keep open.
    """

    def __init__(
        self,
        config: RunnerConfig,
        job: AttemptJob,
        known_modules: frozenset[str],
        close_fds: Iterable[int] = (),
    ) -> None:
        self.pid, self.report_fd, self._leash_fd = fork_agent_process(
            config,
            config.to_json().encode() + b"\n" + job.to_line(),
            lambda report, leash: run_attempts(config, job, report, leash, known_modules),
            close_fds,
        )
        self._received = bytearray()
        self.report: AttemptReport | None = None
        self.reusable = False
        self._further = config.rollouts_per_process - 1
        self._status: int | None = None  # as ``waitstatus_to_exitcode``; None while it runs

    def poll(self) -> bool:
        """Return True when the attempt is over; by then its process group is gone."""
        if self._status is not None:
            return True
        if not self._read_report():
            # A grandchild may hold the pipe open, so its end is not the only sign.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:
                return False
            self._read_report()
            self._kill_group(signal.SIGKILL)
            self._ended(status)
            return True
        if self.report is None:
            pid, status = _wait(self.pid, _EXIT_S)
            self._kill_group(signal.SIGKILL)
            self._ended(status if pid else os.waitpid(self.pid, 0)[1])
        elif self._further and self.report.ok and not self.report.incomplete:
            self._status = 0
            self.reusable = True
        else:
            # Everything was flushed before the report: SIGKILL loses nothing. Until the child is
            # reaped no other process gets its pid, which names the group.
            self._kill_group(signal.SIGKILL)
            self._ended(os.waitpid(self.pid, 0)[1])
        return True

    def ending(self) -> AttemptEnding:
        """Return how the attempt ended, once ``poll`` returned True."""
        if self.report is not None:
            return self.report.ending()
        if self._status is not None and self._status < 0:
            return AttemptEnding(AttemptState.ERROR, f"killed by signal {-self._status}")
        said = f"the agent's process exited with code {self._status}"
        return AttemptEnding(AttemptState.ERROR, said)

    def run_next(self, job: AttemptJob) -> None:
        """Hand a further attempt to the process.

        Raises:
            OSError: the process has died meanwhile.
        """
        self._further -= 1
        self.reusable, self._status, self.report = False, None, None
        self._received.clear()
        os.write(self._leash_fd, job.to_line())

    def signal(self, number: int) -> None:
        """Signal every process of the attempt."""
        if self._status is None:
            self._kill_group(number)

    def kill(self) -> None:
        """Kill and reap the process."""
        if self._status is None or self.reusable:
            self.reusable = False
            self._kill_group(signal.SIGKILL)
            self._ended(os.waitpid(self.pid, 0)[1])

    def _kill_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # No such group: setsid() has not run yet, or the group is gone. (macOS says
            # "permission denied" for a group of zombies.)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _ended(self, status: int) -> None:
        self._status = os.waitstatus_to_exitcode(status)
        os.close(self.report_fd)
        os.close(self._leash_fd)

    def _read_report(self) -> bool:
        """Return True when the report is complete, or none will come."""
        while True:
            try:
                chunk = os.read(self.report_fd, _CHUNK)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._received += chunk
            if self._received.endswith(b"\n"):
                self.report = AttemptReport(**json.loads(self._received))
                return True


def _wait(pid: int, timeout_s: float) -> tuple[int, int]:
    """Call ``waitpid`` until the process is gone or time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = os.waitpid(pid, os.WNOHANG)
        if found[0] or time.monotonic() > deadline:
            return found
        time.sleep(0.002)
