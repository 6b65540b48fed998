"""Learning from preferences: which pairs or scores, and by which loss."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agentrl.config.field_types import NonNegative, Positive, Table


class PreferenceDataSettings(Table):
    """The examples: one of ``source`` and ``from_run``."""

    source: str | None = None
    """Pairs as TRL, Anthropic's HH, HelpSteer3 or UltraFeedback have them: a JSONL, JSON, Parquet
    or CSV file, or a Hugging Face dataset, NAME or NAME:SPLIT."""
    from_run: Path | None = None
    """Run folder: the best rollout of each group against its worst, as the exact tokens that were
    recorded."""
    where: str | None = None
    """With from_run: which rollouts, such as 'step > 10'."""
    by: Literal["reward", "feedback"] = "reward"
    """With from_run: what says how good a rollout is: its reward, or people's feedback."""
    held_out: str | None = None
    """Held-out examples: as source, or the share of the examples to hold out, such as 0.1."""


class PreferenceSettings(Table):
    """The loss of a pair."""

    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """dpo, ipo and kto keep close to a reference: the base model, or what the adapter started
    from. orpo and simpo need none."""
    beta: Positive | None = None
    """Strength of the loss; by default 0.1, of simpo 2."""
    gamma: NonNegative | None = None
    """The margin that simpo asks for; by default 1."""


class RewardModelSettings(Table):
    """The loss of a reward model."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """bradley_terry learns from pairs; regression from scores: chats with a score, UltraFeedback's
    completions, or with from_run all rollouts and their rewards."""
