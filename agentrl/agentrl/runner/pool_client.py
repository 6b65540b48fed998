"""The trainer's handle on the pool: start it as a subprocess, see whether it lives, stop it.

Knows one child process. The trainer has torch threads and must not fork, so the pool is executed
afresh. Its standard input first carries the configuration (a store URL may hold a password, which
``argv`` and the environment would show to others) and then stays open: its end tells the pool that
the trainer is gone, ``kill -9`` included.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

from agentrl.runner.agent import parse_agent, validate_agent
from agentrl.runner.config import RunnerConfig, check_environment
from agentrl.runner.environment import look_certificates_up_by_name
from agentrl.runner.external_python import check_python

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
        """Asks runners to end, and does not wait."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Stops runners and their agents; running attempts are given back to the queue."""
        self.begin_stop()
        process = self._process
        if process.poll() is None:
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # workers see the end of their pipes and stop by themselves
                process.wait()
        with contextlib.suppress(OSError):
            _stdin(process).close()

    def restart(self) -> None:
        """Starts a new pool, whatever has become of the one before."""
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
        look_certificates_up_by_name(env)
        if sys.platform == "darwin":
            # macOS kills forked children whose parent has touched Objective-C, as many a
            # library does when imported.
            env.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.runner"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                # A Ctrl-C in the terminal is the trainer's to handle, in its own order.
                start_new_session=True,
            )
        with contextlib.suppress(BrokenPipeError):  # it died at once: ``alive`` will say so
            _stdin(process).write(self.config.to_json().encode() + b"\n")
            _stdin(process).flush()
        return process


def runner_environment(config: RunnerConfig) -> dict[str, str]:
    """What runners, and so agents, inherit: everything but other models' keys."""
    return {name: value for name, value in os.environ.items() if name not in config.withheld}


def start_pool(config: RunnerConfig) -> PoolHandle:
    """Starts runners; they wait by themselves until the gateway answers.

    Raises:
        ValueError: the agent's spec is wrong, or its interpreter cannot run it.
        RuntimeError: the environment would silence the agents' spans.
    """
    check_environment()
    if config.python is not None:
        config = replace(config, python=check_python(config.python))
    if config.concurrency > 1 and parse_agent(config.agent).kind == "command":
        raise ValueError(
            f"concurrency: got {config.concurrency}, but a command runs in a process of its own; "
            "raise runners instead"
        )
    validate_agent(config.agent, config.python_path, elsewhere=config.python is not None)
    return PoolHandle(config)


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin
