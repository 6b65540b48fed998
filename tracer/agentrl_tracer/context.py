"""Tell which rollout the running code belongs to.

A context variable says it where several rollouts share a process, the environment where a process
runs one rollout. Imports the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

ROLLOUT_VARIABLES = (
    "AGENTRL_ROLLOUT_ID", "AGENTRL_ATTEMPT_ID", "AGENTRL_GATEWAY", "AGENTRL_KEY", "AGENTRL_MODEL",
    "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY", "TRACEPARENT",
)  # fmt: skip
"""Variables that lead a process to its rollout, and its clients to the gateway."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """One attempt of a rollout, as the agent's process knows it."""

    rollout_id: str
    attempt_id: str
    gateway: str  # base URL without /v1
    key: str = field(repr=False)
    environment: Mapping[str, str] = field(repr=False, compare=False)
    """The variables that name the rollout, and others for its subprocesses."""


chosen: ContextVar[RolloutContext | None] = ContextVar("agentrl_rollout", default=None)
"""The rollout of this task or thread, set where several rollouts share a process."""


def current_rollout() -> RolloutContext | None:
    """Return the rollout of the calling code; None outside training."""
    return chosen.get() or rollout_in(os.environ)


def rollout_in(environment: Mapping[str, str]) -> RolloutContext | None:
    """Return the rollout that environment variables name."""
    get = environment.get
    rollout_id, gateway = get("AGENTRL_ROLLOUT_ID"), get("AGENTRL_GATEWAY")
    if not rollout_id or not gateway:
        return None
    attempt_id, key = get("AGENTRL_ATTEMPT_ID", ""), get("AGENTRL_KEY", "")
    return RolloutContext(rollout_id, attempt_id, gateway, key, environment)
