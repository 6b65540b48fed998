"""Keeping a child process alive: start it, notice its death, start it again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger("agentrl")

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_HEALTHY_AFTER_S = 30.0  # a child that lived this long has earned a fresh backoff
_STOP_GRACE_S = 10.0


def end_with_parent() -> None:
    """In a supervised child: end when the supervisor's process is gone, however it went.

    The supervisor holds the other end of our standard input and never writes: end of file means
    that it died, ``kill -9`` included.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Supervised:
    """A child process that is started again whenever it ends by itself.

    Args:
        name: for messages.
        argv: the command.
        log: its standard output and error are appended here.
        env: additions to the environment (secrets travel here, not in ``argv``).
        pass_fds: file descriptors that it inherits, the same ones at every start.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.restarts = 0
        self._argv = list(argv)
        self._log = log
        self._env = dict(env or {})
        self._pass_fds = tuple(pass_fds)
        self._stopping = threading.Event()
        self._process = self._spawn()
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
            process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin:
            process.stdin.close()
        self._thread.join(timeout=_STOP_GRACE_S)

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
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
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                backoff = _FIRST_BACKOFF_S
            logger.warning("%s ended with code %s; starting it again", self.name, code)
            if self._stopping.wait(backoff):
                return
            backoff = min(backoff * 2, _LONGEST_BACKOFF_S)
            if self._process.stdin:
                self._process.stdin.close()
            self.restarts += 1
            self._process = self._spawn()
            if self._stopping.is_set():  # stop() may have looked at the one before
                self._process.kill()


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
