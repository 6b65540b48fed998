"""Tell which rollout the running code belongs to.

A context variable says it where several rollouts share a process, the environment where a process
runs one rollout. Imports the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """One attempt of a rollout, as the agent's process knows it."""

    rollout_id: str
    attempt_id: str
    gateway: str  # base URL without /v1
    key: str = field(repr=False)
    environment: Mapping[str, str] = field(
        default_factory=dict[str, str], repr=False, compare=False, hash=False
    )
    """Variables for the attempt's subprocesses where rollouts share a process environment."""


chosen: ContextVar[RolloutContext | None] = ContextVar("agentrl_rollout", default=None)
"""The rollout of this task or thread, set where several rollouts share a process."""


def current_rollout() -> RolloutContext | None:
    """Return the rollout of the calling code; None outside training."""
    if (rollout := chosen.get()) is not None:
        return rollout
    env = os.environ
    rollout_id, gateway = env.get("AGENTRL_ROLLOUT_ID"), env.get("AGENTRL_GATEWAY")
    if not rollout_id or not gateway:
        return None
    return RolloutContext(
        rollout_id, env.get("AGENTRL_ATTEMPT_ID", ""), gateway, env.get("AGENTRL_KEY", "")
    )
