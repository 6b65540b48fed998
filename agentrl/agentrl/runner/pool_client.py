"""Start the pool as a subprocess of the trainer, see whether it lives, and stop it.

The trainer has torch threads and must not fork, so the pool is executed. Its standard input carries
the configuration (a store URL may hold a password, which ``argv`` and the environment would show to
others) and then stays open: its end tells the pool that the trainer is gone, ``kill -9`` included.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

from agentrl.runner.agent_process.environment import (
    check_environment,
    find_certificates_by_name,
    runner_environment,
)
from agentrl.runner.agent_process.external_python import check_python
from agentrl.runner.agent_spec import parse_agent, validate_agent
from agentrl.runner.protocol import RunnerConfig

_STOP_GRACE_S = 8.0


class PoolHandle:
    """A running pool. ``restarts`` counts the times ``restart`` was called."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.restarts = 0
        self.log = Path(config.logs) / "runners.log"
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def begin_stop(self) -> None:
        """Ask the runners to end, without waiting."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Stop runners and their agents; running attempts go back to the queue."""
        self.begin_stop()
        process = self._process
        if process.poll() is None:
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # workers see the end of their sockets and stop by themselves
                process.wait()
        with contextlib.suppress(OSError):
            _stdin(process).close()

    def restart(self) -> None:
        """Stop this pool, if it is alive, and start a new one."""
        self.stop()
        self.restarts += 1
        self._process = self._spawn()

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _spawn(self) -> subprocess.Popen[bytes]:
        env = runner_environment(self.config)
        find_certificates_by_name(env)
        if sys.platform == "darwin":
            # macOS kills forked children whose parent has touched Objective-C, as many libraries
            # do when they are imported.
            env.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.runner"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal reaches the trainer only
            )
        with contextlib.suppress(BrokenPipeError):  # it died at once, as ``alive`` will tell
            _stdin(process).write(self.config.to_json().encode() + b"\n")
            _stdin(process).flush()
        return process


def start_pool(config: RunnerConfig) -> PoolHandle:
    """Start runners, which wait by themselves until the gateway answers.

    Raises:
        ValueError: the agent's spec is wrong, or its interpreter cannot run it.
        RuntimeError: the environment would silence the agents' spans.
    """
    check_environment()
    if config.python is not None:
        config = replace(config, python=check_python(config.python))
    elif start_method() == "spawn":  # a fork that executes an interpreter is safe everywhere
        config = replace(config, python=sys.executable)
    if config.concurrency > 1 and parse_agent(config.agent).kind == "command":
        raise ValueError(
            f"concurrency: got {config.concurrency}, but a command runs in a process of its own; "
            "raise runners instead"
        )
    validate_agent(config.agent, other_python=config.python is not None)
    return PoolHandle(config)


def start_method() -> str:
    """Return how attempts start: ``fork`` (Linux) or ``spawn`` (elsewhere, a fresh interpreter).

    ``AGENTRL_START_METHOD`` overrides it, so that Linux can run what macOS runs.
    """
    return os.environ.get("AGENTRL_START_METHOD", "fork" if sys.platform == "linux" else "spawn")


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin
