"""Supervise child processes: start one, notice its death, start it again after a backoff."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Self

from agentrl.process_privacy import open_private

logger = logging.getLogger("agentrl")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_HEALTHY_AFTER_S = 10.0


@dataclass(slots=True)
class Backoff:
    """Delays between restarts: they double, and start over after a process that lived long."""

    _delay_s: float = _FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait before replacing a process that lived ``lived_s``."""
        delay = _FIRST_DELAY_S if lived_s > _HEALTHY_AFTER_S else self._delay_s
        self._delay_s = min(2 * delay, _LONGEST_DELAY_S)
        return delay


@dataclass(eq=False, repr=False)
class SupervisedProcess:
    """A child process, which ``spawn`` starts, and ``supervise`` restarts until ``stop``.

    Args:
        name: for log messages.
        argv: the command.
        log: file to which its standard output and error are appended; None inherits ours.
        env: its environment, by default a copy of ours. Secrets go here rather than into ``argv``.
        stdin: what it reads first from its standard input, which then stays open.
        pass_fds: file descriptors that it inherits at every start.
        grace_s: seconds between SIGTERM and SIGKILL in ``stop``.
        cannot_start: exit code that means "invalid settings". If the first process ends with it,
            it is not restarted and ``could_not_start`` is set. Later processes are restarted
            whatever their code, because the cause may pass.
    """

    name: str
    argv: Sequence[str]
    log: Path | None
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    _: KW_ONLY
    stdin: bytes = b""
    pass_fds: Sequence[int] = ()
    grace_s: float = 10.0
    cannot_start: int | None = None
    deaths: int = field(default=0, init=False)
    """How often it ended by itself."""
    restarts: int = field(default=0, init=False)
    """How often it was started again, failures to start it included."""
    last_code: int | None = field(default=None, init=False)
    """Exit code of its last death; negative for a signal."""
    could_not_start: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._told_to_end = False
        self._umask = os.umask(0o077)  # the user's, though a restart may come within private_files
        os.umask(self._umask)
        self._process: subprocess.Popen[bytes] | ForkProcess
        name = f"supervise-{self.name}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def spawn(self, fork: Callable[[], None] | None = None) -> Self:
        """Start the process without supervision, which starts a thread.

        Args:
            fork: what the child does where it may be a fork of this process, which has the imports
                done. Later starts execute ``argv``, because this process has threads then.
        """
        if fork is None:
            self._process = self._execute()
        else:
            self._process = ForkProcess(target=_run_forked, args=(fork, self.log), daemon=True)
            self._process.start()
        return self

    def supervise(self) -> Self:
        """Restart the process from now on whenever it ends by itself."""
        self._thread.start()
        return self

    def let_end(self) -> None:
        """Do not start the process again when it ends: the system may end all of ours at once."""
        self._stopping.set()

    def begin_stop(self) -> None:
        """Send SIGTERM, without waiting for the end."""
        self._stopping.set()
        # Once: after the first signal a process may be ending in order. Before ``spawn`` there is
        # no process.
        if hasattr(self, "_process") and not self._told_to_end:
            self._told_to_end = True
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after ``grace_s`` seconds, and wait for the end."""
        self.begin_stop()
        if not hasattr(self, "_process"):
            return
        if self._thread.ident is None:
            self.supervise()
        self._thread.join(self.grace_s)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, "" if there is none."""
        with contextlib.suppress(OSError):
            if self.log is not None:
                return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _execute(self) -> subprocess.Popen[bytes]:
        with contextlib.nullcontext() if self.log is None else open_private(self.log) as log:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                bufsize=0,  # else closing the pipe of a dead child fails on what it did not read
                stdout=log,
                stderr=log,
                env=self.env,
                umask=self._umask,
                pass_fds=self.pass_fds,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once
            process.stdin.write(self.stdin)
        return process

    def _watch(self) -> None:
        """Wait for the process and start it again; no other thread waits for it."""
        backoff = Backoff()
        while True:
            started = time.monotonic()
            code = self.last_code = _wait(self._process)
            if self._stopping.is_set():
                return
            self.deaths += 1
            if self.deaths == 1 and code == self.cannot_start:
                self.could_not_start = True
                return
            if self._stopping.wait(backoff.after(time.monotonic() - started)):
                return
            logger.warning("%s ended with code %s; starting it again", self.name, code)
            while not self._start_again():
                if self._stopping.wait(_LONGEST_DELAY_S):
                    return
            if self._stopping.is_set():  # stop() may have seen the previous process
                self._process.kill()

    def _start_again(self) -> bool:
        self.restarts += 1
        try:
            self._process = self._execute()
        except OSError as error:  # no process, memory or disk is left
            logger.warning("%s could not be started again: %s", self.name, error)
            return False
        return True


def first_line(descriptor: int) -> bytes:
    """Return what ``SupervisedProcess`` writes first: a line, after which nothing follows."""
    line = b""
    while not line.endswith(b"\n") and (part := os.read(descriptor, 65536)):
        line += part
    return line


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


def _wait(process: subprocess.Popen[bytes] | ForkProcess) -> int | None:
    if isinstance(process, subprocess.Popen):
        with process:  # closes its standard input at last
            return process.wait()
    process.join()
    return process.exitcode


def _run_forked(main: Callable[[], None], log: Path | None) -> None:
    """Give a fork what an executed child has: its own session, log file and logging."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):  # their handlers are of the parent's command
        signal.signal(number, signal.SIG_DFL)
    if log is not None:
        with open_private(log) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    for inherited in (logging.getLogger(), logger):
        inherited.handlers.clear()
        inherited.propagate = True
    with contextlib.suppress(KeyboardInterrupt):
        main()
