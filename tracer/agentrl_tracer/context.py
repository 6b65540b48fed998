"""Which rollout the code that is running belongs to.

Knows a context variable (several rollouts may share a process) and the environment (a process of
its own). Does not know OpenTelemetry, HTTP or the store; imports the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """A rollout's attempt, as its own process knows it."""

    rollout_id: str
    attempt_id: str
    gateway: str  # its base URL, without /v1
    key: str = field(repr=False)
    environment: Mapping[str, str] = field(
        default_factory=dict[str, str], repr=False, compare=False, hash=False
    )
    """Variables for its subprocesses, where the process's own environment is not its alone."""


chosen: ContextVar[RolloutContext | None] = ContextVar("agentrl_rollout", default=None)
"""Set where several rollouts share the process; else the environment says it."""


def current_rollout() -> RolloutContext | None:
    """The rollout of the code that calls this; None outside training."""
    rollout = chosen.get()
    return rollout if rollout is not None else _rollout_of_process()


def _rollout_of_process() -> RolloutContext | None:
    env = os.environ
    rollout_id, gateway = env.get("AGENTRL_ROLLOUT_ID"), env.get("AGENTRL_GATEWAY")
    if not rollout_id or not gateway:
        return None
    return RolloutContext(
        rollout_id, env.get("AGENTRL_ATTEMPT_ID", ""), gateway, env.get("AGENTRL_KEY", "")
    )
