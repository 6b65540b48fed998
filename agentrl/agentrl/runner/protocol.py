"""What pool, workers and agent processes send each other, as JSON lines.

Plain dataclasses, because an agent's own interpreter need not have pydantic.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl_tracer.schemas import AttemptState

GRACE_S = 2.0
"""Between SIGTERM, or a cancellation, and SIGKILL."""
HARBOR = "harbor:"
"""Begins the ``agent`` setting: ``harbor:PATH`` of a task or a folder of tasks."""
HARBOR_GRACE_S = 30.0
"""For Harbor besides, to remove a trial's containers."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The configuration of a pool of runners; ``agentrl.config`` has the defaults of settings."""

    store: str  # URL or path of the trace store; in the pool the SQLite file, or empty
    gateways: list[str]
    """Base URLs, without ``/v1`` or a final slash. A worker's configuration has one."""
    run_id: str  # whose rollouts are claimed
    agent: str  # ``module:function``, ``file.py:function`` or a command line
    model: str  # the model name that agents are told to ask for (``AGENTRL_MODEL``)
    logs: str  # folder of ``runners.log`` and one log per attempt
    runners: int  # number of workers
    timeout_s: float  # hard limit of one attempt
    lease_s: float  # a runner silent for this long counts as lost
    rollouts_per_process: int = 1  # attempts that a process may run in turn; 1: a fresh one each
    concurrency: int = 1  # attempts of an async agent that a process runs at a time
    log_bytes: int = 4 << 20  # that an attempt's log may hold
    python: str | None = None  # another virtual environment's interpreter, which runs the agent
    user: str | None = None  # whose processes the agents are; None: the runner's
    sandbox: bool = False  # run each agent process in bubblewrap
    hidden: list[str] = field(default_factory=list[str])
    """Folders that the sandbox does not show."""
    withheld: list[str] = field(default_factory=list[str])
    """Variables that agents do not get: other models' keys."""
    pool: str = ""  # the pool's name, which it keeps when it is started again

    @property
    def grace_s(self) -> float:
        """Return the time that an attempt has to end, once it is asked to."""
        return GRACE_S + (HARBOR_GRACE_S if self.agent.startswith(HARBOR) else 0.0)

    @property
    def gateway(self) -> str:
        """The URL of the first gateway."""
        return self.gateways[0]

    def of_worker(self, index: int) -> RunnerConfig:
        """Return a worker's configuration. Pools begin with different gateways."""
        chosen = (zlib.crc32(self.pool.encode()) + index) % len(self.gateways)
        return replace(self, gateways=[self.gateways[chosen]])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunnerConfig:
        return cls(**json.loads(text))

    def log_of(self, rollout_id: str, attempt_number: int) -> str:
        """Return the file that takes an attempt's standard output and error."""
        return str(Path(self.logs) / f"{rollout_id}-{attempt_number}.log")

    def shared_log(self, pid: int) -> str:
        """Return the file that takes what attempts that share a process write below Python."""
        return str(Path(self.logs) / f"shared-{pid}.log")


class AttemptFailed(RuntimeError):
    """An attempt failed as its message says; a traceback of our modules would explain nothing."""

    def __init__(self, message: str, state: AttemptState = AttemptState.ERROR) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True, slots=True)
class AttemptEnding:
    """How an attempt ended, as its process or its worker sees it."""

    state: AttemptState
    error: str | None = None
    modules: Sequence[str] = ()  # installed modules that the attempt imported

    @classmethod
    def of(cls, failures: Sequence[AttemptFailed], *, complete: bool) -> AttemptEnding:
        """Return the ending of an agent that returned (no ``failures``) or failed."""
        if not complete:
            lost = "its spans or rewards did not reach the gateway"
            said = "; the agent: ".join([lost, *map(str, failures)])
            return cls(AttemptState.INFRASTRUCTURE, said)
        if failures:
            return cls(failures[0].state, str(failures[0]))
        return cls(AttemptState.SUCCEEDED)


def send(fd: int, message: Mapping[str, Any]) -> None:
    """Write a message to a socket, in full; raise ``OSError`` if the other end is closed."""
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(fd, view) :]
