"""What pool, workers and agent processes send each other, as JSON lines.

Plain dataclasses, because an agent's own interpreter need not have pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from agentrl_tracer.schemas import AttemptState, Claim, Purpose


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The configuration of a pool of runners; ``agentrl.config`` has the defaults of settings.

    Attributes:
        store: URL or path of the trace store.
        gateway: base URL of the gateway, without ``/v1``.
        run_id: only this run's rollouts are claimed; None: any.
        agent: ``module:function``, ``file.py:function`` or a command line.
        model: the model name that agents are told to ask for (``AGENTRL_MODEL``).
        logs: folder of ``runners.log`` and one log per attempt.
        runners: number of workers.
        timeout_s: hard limit of one attempt.
        lease_s: a runner silent for this long counts as lost.
        rollouts_per_process: attempts that a process may run in turn; 1: a fresh one for each.
        concurrency: attempts of an async agent that a process runs at a time.
        python: another interpreter (of another virtual environment) that runs the agent.
        withheld: environment variables that agents do not get: other models' keys.
    """

    store: str
    gateway: str
    run_id: str | None
    agent: str
    model: str
    logs: str
    runners: int
    timeout_s: float
    lease_s: float
    rollouts_per_process: int = 1
    concurrency: int = 1
    python: str | None = None
    withheld: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunnerConfig:
        fields = json.loads(text)
        return cls(**fields | {"withheld": tuple(fields["withheld"])})


@dataclass(frozen=True, slots=True)
class AttemptJob:
    """An attempt to run, and the file that takes its standard output and error."""

    claim: Claim
    log: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> AttemptJob:
        fields = json.loads(line)
        claim = fields["claim"] | {"purpose": Purpose(fields["claim"]["purpose"])}
        return cls(Claim(**claim), fields["log"])


@dataclass(frozen=True, slots=True)
class AttemptEnding:
    """How an attempt ended, before a failing gateway is considered.

    Attributes:
        incomplete: some span or reward did not reach the gateway.
    """

    state: AttemptState
    error: str | None
    incomplete: bool = False


@dataclass(slots=True)
class AttemptReport:
    """What an agent process tells its worker at the end of an attempt.

    Attributes:
        incomplete: some span or reward did not reach the gateway.
        third_party_modules: installed modules that the attempt imported.
    """

    ok: bool
    error: str | None = None
    incomplete: bool = False
    third_party_modules: list[str] = field(default_factory=list[str])

    def ending(self) -> AttemptEnding:
        if self.ok and not self.incomplete:
            return AttemptEnding(AttemptState.SUCCEEDED, None)
        error = self.error or "its spans or rewards did not reach the gateway"
        state = AttemptState.INFRASTRUCTURE if self.ok else AttemptState.ERROR
        return AttemptEnding(state, error, self.incomplete)


def take_lines(received: bytearray) -> Iterator[bytes]:
    """Remove the whole lines from a buffer, and yield them."""
    while (end := received.find(b"\n")) >= 0:
        yield bytes(received[:end])
        del received[: end + 1]
