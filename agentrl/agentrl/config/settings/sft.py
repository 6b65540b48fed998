"""Supervised fine-tuning: which examples, and which of their tokens train."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agentrl.config.field_types import Count, Store, Table


class SftDataSettings(Table):
    """The examples: one of ``source``, ``from_run`` and ``from_served``."""

    source: str | None = None
    """Chats in OpenAI's or ShareGPT's form: a JSONL, JSON, Parquet or CSV file, or a Hugging Face
    dataset, NAME or NAME:SPLIT."""
    from_run: Path | None = None
    """Run folder whose rollouts are the examples, as the exact tokens that were recorded."""
    where: str | None = None
    """With from_run: which rollouts, such as 'reward >= 1 and step > 10'; by default the successful
    ones, or with best_of those that have a reward."""
    best_of: Count | None = None
    """With from_run: only so many rollouts of a task, those with the highest rewards."""
    from_served: Store | None = None
    """Store of `agentrl serve`, such as runs/serve.db, whose calls are the examples."""
    held_out: str | None = None
    """Held-out examples: as source, or the share of the examples to hold out, such as 0.1."""
    train_on: Literal["all", "last", "tagged"] = "all"
    """Which answers of a chat train: all, the last, or tagged: those with a weight (OpenAI's
    `weight`, 0 or more, or `train`: true). Weights count with all and last too."""
