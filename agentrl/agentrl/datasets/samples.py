"""Examples as token rows, with what they answer, and a count of what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl_trainer.data.training_row import TrainingRow


@dataclass(frozen=True, slots=True)
class Example:
    """What is learned as a whole: a row of tokens, or a chosen and a rejected one."""

    rows: tuple[TrainingRow, ...]
    task: str
    """What it answers: examples of one task are never both trained on and held out."""
    score: float = 0.0
    """How good the answer is, where that is to be learned."""
    group: str = ""
    """Of a rollout: those of one group are compared."""

    @property
    def length(self) -> int:
        """The tokens of its longest row."""
        return max(len(row.tokens) for row in self.rows)


@dataclass(slots=True)
class Samples:
    """Examples, and how many were left out, by reason."""

    kept: list[Example] = field(default_factory=list[Example])
    left_out: Counter[str] = field(default_factory=Counter[str])


def weighted_row(tokens: list[int], weights: Sequence[float]) -> TrainingRow:
    """Make a row whose ``advantages`` are the weights of its tokens, as ``cross_entropy`` takes
    them; those above 0 train."""
    own = list(weights)
    return TrainingRow(tokens, [weight > 0 for weight in own], [0.0] * len(own), own)
