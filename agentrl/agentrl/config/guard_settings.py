"""The settings of what ends a run early: budgets, and what follows when it collapses."""

from __future__ import annotations

from typing import Literal

from agentrl.config.field_types import Count, Positive, Table, Whole


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
