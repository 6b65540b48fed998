"""Ranks beside the first, as processes of its machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe

from agentrl_trainer.distributed.plan import SetupCall


class FollowerProcess:
    """A ``Follower`` in a process, as the first rank sees it."""

    node = ""
    """The machine that it runs on."""

    def __init__(self, setup: Sequence[SetupCall]) -> None:
        self._pipe, theirs = Pipe()
        module = "agentrl_trainer.distributed.follower"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        theirs.close()
        self.send(pickle.dumps(setup))

    def send(self, pickled: bytes) -> None:
        """Have it do what ``Follower.do`` takes; does not wait."""
        with contextlib.suppress(OSError):  # it ended; the first collective finds out
            self._pipe.send_bytes(pickled)

    def why_ended(self, timeout_s: float | None) -> str | None:
        """Wait for its next word, or its end; return why it ended, None if it did not."""
        with contextlib.suppress(EOFError, OSError):
            return self._pipe.recv() if self._pipe.poll(timeout_s) else None
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "it was killed by signal 9, as the kernel does where memory runs out"
        return f"it was killed by signal {-code}" if code < 0 else f"its exit code was {code}"

    def kill(self) -> None:
        """Kill it, on any thread; ``why_ended`` then returns."""
        self.process.kill()

    def end(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()
