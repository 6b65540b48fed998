"""Training on examples that are there already: which, the loss, passes, measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.field_types import Count, NonNegative, Positive, Store, Table
from agentrl.config.settings.learning import LearningSettings
from agentrl.config.settings.run import NewRunSettings

_Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
HeldOut = Annotated[_Share | str, Field(union_mode="left_to_right")]


class DataSettings(Table):
    source: str | None = None
    from_run: Path | None = None
    """Run folder whose rollouts are the examples, as the exact tokens that were recorded."""
    where: str | None = None
    """With from_run: which rollouts, such as 'step > 10'."""
    held_out: HeldOut | None = None
    """Held-out examples: as source, or the share of the examples to hold out, such as 0.1."""


class SftDataSettings(DataSettings):
    """The examples: one of ``source``, ``from_run`` and ``from_served``."""

    source: str | None = None
    """Chats in OpenAI's or ShareGPT's form: a JSONL, JSON, Parquet or CSV file, or a Hugging Face
    dataset, NAME or NAME:SPLIT."""
    where: str | None = None
    """With from_run: which rollouts, such as 'reward >= 1 and step > 10'; by default the successful
    ones, or with best_of those that have a reward."""
    best_of: Count | None = None
    """With from_run: only so many rollouts of a task, those with the highest rewards."""
    from_served: Store | None = None
    """Store of `agentrl serve`, such as runs/serve.db, whose calls are the examples."""
    train_on: Literal["all", "last", "tagged"] = "all"
    """Which answers of a chat train: all, the last, or tagged: those with a weight (OpenAI's
    `weight`, 0 or more). Weights count with all and last too."""


class PreferenceDataSettings(DataSettings):
    """The examples: one of ``source`` and ``from_run``."""

    source: str | None = None
    """Pairs as TRL, Anthropic's HH, HelpSteer3 or UltraFeedback have them: a JSONL, JSON, Parquet
    or CSV file, or a Hugging Face dataset, NAME or NAME:SPLIT."""
    by: Literal["reward", "feedback"] = "reward"
    """With from_run, which pairs the best rollout of each group with its worst: what says how good
    a rollout is, its reward or people's feedback."""


class PreferenceSettings(Table):
    """The loss of a pair."""

    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """dpo, ipo and kto keep close to a reference: the base model, or what the adapter started
    from. orpo and simpo need none."""
    beta: Positive | None = None
    """Strength of the loss; by default 0.1, of simpo 2."""
    gamma: NonNegative = 1.0
    """The margin that simpo asks for."""


class RewardModelSettings(Table):
    """The loss of a reward model."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """bradley_terry learns from pairs; regression from scores: chats with a score, UltraFeedback's
    completions, or with from_run all rollouts and their rewards."""


class OfflineLearningSettings(LearningSettings):
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls over the steps of the run."""
    epochs: Count = 3
    """Passes over the examples."""
    batch_size: Count = 32
    """Examples of an optimizer step."""


class OfflineEvaluationSettings(Table):
    """Measures of held-out examples."""

    every: Count = 10
    """Steps between measures of the held-out loss; before the first and after the last too."""
    patience: Count | None = None
    """Stop once so many measures in a row were no better than the best before them."""


class OfflineRunSettings(NewRunSettings):
    checkpoint_every: Count = 10
    """Steps between checkpoints, from which --resume goes on; after the last step too."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""
    keep_adapters: Count | None = None
    """Newest adapters to keep; each measure saves one. By default all. The best one, those of kept
    checkpoints, the best as of each of these, and folders that hold a file named keep stay."""
