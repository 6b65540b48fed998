"""The settings of a training's evaluations and guards: what may end it early."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agentrl.config.field_types import Count, Positive, Share, Table, Whole
from agentrl.config.settings import EvaluationSettings


class TrainEvaluationSettings(EvaluationSettings):
    tasks: Path | None = None
    """Held-out tasks (JSON lines); never trained on."""
    every: Count = 5
    """Steps between evaluations; before the first and after the last too."""
    stop_at: Share | None = None
    """Stop once the held-out accuracy reaches this value."""
    patience: Count | None = None
    """Stop once so many evaluations in a row were no better than the best before them."""


class GuardSettings(Table):
    """Limits of a run, and what follows when it collapses. ``evaluation`` has those of success."""

    max_hours: Positive | None = None
    """Hours that the run may take, those before a --resume included. It ends before a step that
    would not fit."""
    max_run_tokens: Count | None = None
    """Tokens that the models in training may read and sample in the run, evaluations included. The
    run ends before a step that would not fit."""
    max_cost: Positive | None = None
    """US dollars that the calls of other models may cost, by LiteLLM's price table. The run ends
    before a step that would not fit."""
    on_collapse: Literal["note", "stop", "roll_back"] = "note"
    """When an alert says that the run collapses: show it; stop; or go back to the step with the
    best held-out accuracy and go on with half the learning rate."""
    roll_backs: Whole = 2
    """With roll_back: how often; the next collapse stops the run."""
