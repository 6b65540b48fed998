"""How a run ended: what the command line shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Accounting


class Reply(NamedTuple):
    """What the agent's model said to one held-out task, before and after."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    folder: RunFolder
    steps: int
    rewards: list[float | None]
    """The mean of each step; None where nothing was rewarded."""
    accounting: Accounting
    held_out: list[tuple[int, float]]
    replies: list[Reply]
    seconds: dict[str, float]
    cores_busy: dict[str, float]
    """Share of the machine's cores that were busy in each phase, 0 to 1."""

    @property
    def learned_nothing(self) -> bool:
        """Steps were made, and not one call trained."""
        return self.steps > 0 and not self.accounting.trained
