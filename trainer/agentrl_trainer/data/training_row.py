"""Define the row that the learner trains on: tokens, and what is known of each. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl_trainer.data.trajectories import Trajectory

LOSS_EXTRA = frozenset({"weights", "proximal", "reference"})
"""Optional arguments of a loss, see ``learner.losses.Loss``."""
EXTRA = LOSS_EXTRA | {"rewards", "values", "returns", "temperature"}
"""All columns that a row may have beside its lists. A value function learns from ``rewards``
(earned with the token), ``values`` (predicted before the update) and ``returns`` (its targets).
``temperature`` is the one that the token was sampled at, 1 without the column."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of tokens to learn from. The four lists run parallel.

    ``mask[0]`` is false: the first token has no log-prob. ``logprobs`` (of the sampling policy) and
    ``advantages`` are read only where the mask is on. For ``cross_entropy`` the advantages are the
    weights; logprobs may then be all zeros, and ratio metrics mean nothing.

    Raises:
        ValueError: lists of different lengths, an unknown column, or a trained first token.
    """

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    adapter: str = "default"
    extra: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])
    """More columns, parallel to the lists and read where the mask is on: see ``EXTRA``."""

    def __post_init__(self) -> None:
        if unknown := self.extra.keys() - EXTRA:
            raise ValueError(f"extra holds {sorted(unknown)}, but known are {sorted(EXTRA)}")
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.advantages)}
        lengths |= {len(values) for values in self.extra.values()}
        if len(lengths) > 1:
            raise ValueError(f"a row's lists must have one length, not {sorted(lengths)}")
        if self.mask and self.mask[0]:
            raise ValueError("the first token of a row cannot be trained: nothing precedes it")

    @property
    def trained(self) -> int:
        """The number of tokens that train."""
        return sum(self.mask)


def to_training_row(
    trajectory: Trajectory,
    credit: Mapping[str, float],
    extra: Mapping[str, list[float]] | None = None,
) -> TrainingRow:
    """Make the row of a trajectory; ``credit`` holds the advantages by call id.

    Calls without an entry get 0 but stay in the mask, so they count in the normalization.
    """
    tokens = trajectory.tokens
    mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
    for call in trajectory.calls:
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = call.response_logprobs
    advantages = trajectory.spread(credit)
    return TrainingRow(tokens, mask, logprobs, advantages, trajectory.adapter, extra or {})


def with_extra(rows: Sequence[TrainingRow], **columns: Sequence[list[float]]) -> list[TrainingRow]:
    """Add columns to rows; each column is a list parallel to ``rows``."""
    return [
        replace(row, extra={**row.extra, **{name: column[i] for name, column in columns.items()}})
        for i, row in enumerate(rows)
    ]
