"""Keeping a child process alive: start it, notice its death, start it again."""

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

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_HEALTHY_AFTER_S = 30.0  # a child that lived this long has earned a fresh backoff
_STOP_GRACE_S = 10.0


def end_with_parent() -> None:
    """In a supervised child: end when the supervisor's process is gone, however it went.

    The supervisor holds the other end of a pipe and never writes: end of file means that it died,
    ``kill -9`` included. In an executed child that pipe is the standard input.
    """
    forked_by = multiprocessing.parent_process()
    leash = 0 if forked_by is None else forked_by.sentinel

    def watch() -> None:
        connection.wait([leash])
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Supervised:
    """A child process that is started again whenever it ends by itself, until it is stopped.

    Args:
        name: for messages.
        argv: the command.
        log: its standard output and error are appended here; None: they are ours.
        env: additions to the environment (secrets travel here, not in ``argv``).
        env_again: of them, what is different from the second start on.
        pass_fds: file descriptors that it inherits, the same ones at every start.
        fork: what the child does, where it may begin as a fork of this process, which has imported
            what it needs. Only the first time: later there are threads here, so it is executed.
        grace_s: what ``stop`` leaves it for ending by itself.
        cannot_start: the code that it ends with where it cannot begin. The first one that does so
            is the last one. (One that takes over from one that began may find it better later.)
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
        """What it ended with when it last ended by itself; negative: by which signal."""
        self.could_not_start = False
        self._argv = list(argv)
        self._log = log
        self._env = dict(env or {})
        self._env_again = dict(env_again or {})
        self._pass_fds = tuple(pass_fds)
        self._grace_s = grace_s
        self._cannot_start = cannot_start
        self._stopping = threading.Event()
        self._process: _Process = _Forked(fork, log) if fork is not None else self._spawn()
        self._thread = threading.Thread(target=self._watch, name=f"supervise-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Asks it to end (SIGTERM), then makes it."""
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
        if self._log is None:
            return ""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _spawn(self) -> _Process:
        with contextlib.nullcontext() if self._log is None else self._log.open("ab") as log:
            return _Executed(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                pass_fds=self._pass_fds,
                # A Ctrl-C in the terminal is the supervisor's to handle, in its own order.
                start_new_session=True,
            )

    def _watch(self) -> None:
        backoff = _FIRST_BACKOFF_S
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
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                backoff = _FIRST_BACKOFF_S
            if self._stopping.wait(backoff):
                return
            # Only now: whoever counts deaths may have had enough meanwhile.
            logger.warning("%s ended with code %s; starting it again", self.name, code)
            backoff = min(backoff * 2, _LONGEST_BACKOFF_S)
            self.restarts += 1
            self._env |= self._env_again
            self._process = self._spawn()
            if self._stopping.is_set():  # stop() may have looked at the one before
                self._process.kill()


class _Process(Protocol):
    """A child: the part of ``subprocess.Popen`` that a supervisor needs."""

    @property
    def pid(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class _Executed(subprocess.Popen[bytes]):
    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()  # our end of its leash
        return code


class _Forked:
    """``main`` in a fork of this process, which must have one thread only."""

    def __init__(self, main: Callable[[], None], log: Path | None) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run_forked, args=(main, log), daemon=True)
        self._process.start()
        self._reaping = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        with self._reaping:  # of two threads that reap at once, one would find no child
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


def _run_forked(main: Callable[[], None], log: Path | None) -> None:
    """Becomes what an executed child is: a session, a log, logging of its own."""
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


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
