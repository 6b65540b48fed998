"""Supervise child processes: start one, notice its death, start it again after a backoff."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("agentrl")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_HEALTHY_AFTER_S = 10.0
_STOP_GRACE_S = 10.0


class Backoff:
    """Delays between restarts: they double, and start over after a process that lived long."""

    def __init__(self) -> None:
        self._delay_s = _FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait before replacing a process that lived ``lived_s``."""
        delay = _FIRST_DELAY_S if lived_s > _HEALTHY_AFTER_S else self._delay_s
        self._delay_s = min(2 * delay, _LONGEST_DELAY_S)
        return delay


class SupervisedProcess:
    """A child process that is restarted whenever it ends by itself, until ``stop``.

    Args:
        name: for log messages.
        argv: the command.
        log: file to which its standard output and error are appended; None inherits ours.
        env: additions to the environment. Secrets go here rather than into ``argv``.
        env_again: overrides of ``env`` for every start after the first.
        pass_fds: file descriptors that it inherits at every start.
        fork: what the child does where the first start may be a fork of this process, which has
            the imports done. Later starts execute ``argv``, because this process has threads then.
        grace_s: seconds between SIGTERM and SIGKILL in ``stop``.
        cannot_start: exit code that means "invalid settings". If the first process ends with it,
            it is not restarted and ``could_not_start`` is set. Later processes are restarted
            whatever their code, because the cause may pass.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path | None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        fork: Callable[[], None] | None = None,
        grace_s: float = _STOP_GRACE_S,
        cannot_start: int | None = None,
        env_again: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.deaths = 0
        """How often it ended by itself."""
        self.restarts = 0
        self.last_code: int | None = None
        """Exit code of its last death; negative for a signal."""
        self.could_not_start = False
        self._argv = list(argv)
        self._log = log
        self._env = dict(env or {})
        self._env_again = dict(env_again or {})
        self._pass_fds = tuple(pass_fds)
        self._grace_s = grace_s
        self._cannot_start = cannot_start
        self._stopping = threading.Event()
        self._process: _Child = _Forked(fork, log) if fork is not None else self._execute()
        self._thread = threading.Thread(target=self._watch, name=f"supervise-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after ``grace_s`` seconds, and wait for the end."""
        self._stopping.set()
        process = self._process
        process.terminate()
        try:
            process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join(timeout=_STOP_GRACE_S)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, "" if there is none."""
        with contextlib.suppress(OSError):
            if self._log is not None:
                return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _execute(self) -> _Child:
        with contextlib.nullcontext() if self._log is None else self._log.open("ab") as log:
            return _Executed(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                pass_fds=self._pass_fds,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only
            )

    def _watch(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            self.last_code = code
            self.deaths += 1
            if self.deaths == 1 and code == self._cannot_start:
                self.could_not_start = True
                return
            if self._stopping.wait(backoff.after(time.monotonic() - started)):
                return
            logger.warning("%s ended with code %s; starting it again", self.name, code)
            self.restarts += 1
            self._env |= self._env_again
            self._process = self._execute()
            if self._stopping.is_set():  # stop() may have seen the previous process
                self._process.kill()


def end_with_parent() -> None:
    """End this supervised child as soon as its supervisor is gone, even by ``kill -9``.

    The supervisor holds the other end of a pipe and never writes, so end of file means that it
    died. An executed child has that pipe as its standard input.
    """
    forked_by = multiprocessing.parent_process()
    pipe = 0 if forked_by is None else forked_by.sentinel

    def watch() -> None:
        connection.wait([pipe])
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


class _Child(Protocol):
    """The part of ``subprocess.Popen`` that a supervisor needs."""

    @property
    def pid(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class _Executed(subprocess.Popen[bytes]):
    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()
        return code


class _Forked:
    """``main`` in a fork of this process, which must have a single thread."""

    def __init__(self, main: Callable[[], None], log: Path | None) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run_forked, args=(main, log), daemon=True)
        self._process.start()
        self._reaping = threading.Lock()
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        with self._reaping:  # two threads must not reap the same child
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


def _run_forked(main: Callable[[], None], log: Path | None) -> None:
    """Give a fork what an executed child has: its own session, log file and logging."""
    os.setsid()
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    for inherited in (logging.getLogger(), logger):
        inherited.handlers.clear()
        inherited.propagate = True
    with contextlib.suppress(KeyboardInterrupt):
        main()
