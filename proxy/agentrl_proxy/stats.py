"""Counters of one gateway since it started, as ``/healthz`` reports them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class GatewayStats:
    """Counts since start: ``accepted`` and ``other_models`` of choices, the rest of requests."""

    accepted: int = 0
    in_flight: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    late: int = 0  # 409: the attempt was sealed while sampling
    replayed: int = 0  # client retries answered with a replayed answer
    continued: int = 0  # prompts that kept the exact tokens of an earlier call
    rendered: int = 0
    constrained: int = 0  # sampled under a grammar: response_format, tool_choice
    branched: dict[str, int] = field(default_factory=dict[str, int])
    """Prompts that did not continue the last reply, by reason: see rendering.continuity.Branch."""
    other_models: int = 0  # choices of providers' models
    refused: int = 0  # 401 and 403
    mismatched: int = 0  # of those, header, path and key named different rollouts
    sealed: int = 0  # 409 at once: the attempt had ended
    overloaded: int = 0  # 429: too many requests at once
    over_budget: int = 0  # 429: the rollout's budget is used up

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
