"""What pool, workers and agent processes send each other, as JSON lines.

Plain dataclasses, because an agent's own interpreter need not have pydantic.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl_tracer.schemas import AttemptState, Claim, Purpose


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The configuration of a pool of runners; ``agentrl.config`` has the defaults of settings."""

    store: str  # URL or path of the trace store
    gateway: str  # base URL, without ``/v1``
    run_id: str  # whose rollouts are claimed
    agent: str  # ``module:function``, ``file.py:function`` or a command line
    model: str  # the model name that agents are told to ask for (``AGENTRL_MODEL``)
    logs: str  # folder of ``runners.log`` and one log per attempt
    runners: int  # number of workers
    timeout_s: float  # hard limit of one attempt
    lease_s: float  # a runner silent for this long counts as lost
    rollouts_per_process: int = 1  # attempts that a process may run in turn; 1: a fresh one each
    concurrency: int = 1  # attempts of an async agent that a process runs at a time
    python: str | None = None  # another virtual environment's interpreter, which runs the agent
    withheld: tuple[str, ...] = ()  # variables that agents do not get: other models' keys

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunnerConfig:
        fields = json.loads(text)
        return cls(**fields | {"withheld": tuple(fields["withheld"])})

    def log_of(self, claim: Claim) -> str:
        """Return the file that takes an attempt's standard output and error."""
        return str(Path(self.logs) / f"{claim.rollout_id}-{claim.attempt_number}.log")


@dataclass(frozen=True, slots=True)
class AttemptEnding:
    """How an attempt ended, as its process or its worker sees it."""

    state: AttemptState
    error: str | None = None
    incomplete: bool = False  # some span or reward did not reach the gateway
    modules: tuple[str, ...] = ()  # installed modules that the attempt imported

    @classmethod
    def of(cls, error: str | None, *, complete: bool) -> AttemptEnding:
        """Return the ending of an agent that returned (``error`` is None) or failed."""
        if error is not None:
            return cls(AttemptState.ERROR, error, incomplete=not complete)
        if complete:
            return cls(AttemptState.SUCCEEDED)
        lost = "its spans or rewards did not reach the gateway"
        return cls(AttemptState.INFRASTRUCTURE, lost, incomplete=True)


def claim_from(fields: Mapping[str, Any]) -> Claim:
    """Return the claim whose ``asdict`` was sent."""
    return Claim(**{**fields, "purpose": Purpose(fields["purpose"])})


def send(fd: int, message: Mapping[str, Any]) -> None:
    """Write a message to a pipe; wait while it is full.

    Raises:
        OSError: the other end is closed.
    """
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(fd, view) :]


def take_messages(received: bytearray) -> Iterator[dict[str, Any]]:
    """Remove the whole lines from a buffer, and yield their messages."""
    while (end := received.find(b"\n")) >= 0:
        line = bytes(received[:end])
        del received[: end + 1]
        yield json.loads(line)
