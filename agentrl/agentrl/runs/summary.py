"""How a run ended: what the command line shows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Accounting


class Reply(NamedTuple):
    """What the agent's model said to one held-out task, before and after."""

    prompt: str
    before: str
    after: str


class Ending(NamedTuple):
    """Why a run ended before its last step.

    Attributes:
        guard: the setting, such as ``evaluation.stop_at``.
        evaluates: the last step is still to be evaluated.
        again: the arguments of ``agentrl`` that go on from the best step.
        rolls_back: this process does so.
    """

    guard: str
    sentence: str
    evaluates: bool = False
    again: Sequence[str] = ()
    rolls_back: bool = False


def shares_of_cores(folder: RunFolder) -> Mapping[str, float]:
    """Return the share of the cores that were busy in each phase of a training, 0 to 1.

    Empty until it has ended. A run that was resumed has the shares of its last start.
    """
    try:
        return json.loads(folder.summary.read_text(encoding="utf-8")).get("cores_busy", {})
    except (OSError, ValueError):
        return {}


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
    ended: Ending | None = None
    """None: after its last step."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best held-out accuracy, of equal ones the earliest, and that."""
        return min(self.held_out, key=lambda one: (-one[1], one[0]), default=None)

    @property
    def learned_nothing(self) -> bool:
        """Steps were made, and not one call trained."""
        return self.steps > 0 and not self.accounting.trained
