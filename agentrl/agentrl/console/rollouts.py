"""Rollouts and calls as tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from agentrl.console.tables import fitted
from agentrl.history.rollout_table import Row
from agentrl.runs.excerpts import answer_excerpt, excerpt, prompt_excerpt
from agentrl_tracer.schemas import Call

_FORMS = {"reward": "+.3g", "seconds": ".1f", "tokens": ",", "prompt_tokens": ","}
_COLUMNS = (
    "id", "step", "purpose", "task", "index", "status", "reward", "feedback", "attempts", "calls",
    "prompt_tokens", "tokens", "seconds", "agent", "error",
)  # fmt: skip
_EXPENDABLE = (
    "prompt_tokens", "agent", "attempts", "index", "calls", "seconds", "error", "tokens", "purpose",
)  # fmt: skip


def rollouts_table(rows: Sequence[Row], width: int) -> Table:
    """Show a row for each rollout; columns without a value are left out."""
    columns = {name: [_cell(name, row[name]) for row in rows] for name in _COLUMNS}
    known = {name: cells for name, cells in columns.items() if any(cell != "–" for cell in cells)}
    expendable = [name for name in _EXPENDABLE if name in known]
    return fitted(known, width, expendable, cut_last="error" in known)


def calls_table(calls: Sequence[Call], width: int) -> Table:
    """Show a row for each call; the last column is its answer."""
    columns = {
        "id": [call.id for call in calls],
        "started": [
            time.strftime("%m-%d %H:%M:%S", time.localtime(call.started_at)) for call in calls
        ],
        "model": [call.model for call in calls],
        "adapter": [f"{c.adapter}@{c.adapter_version}" if c.adapter else "–" for c in calls],
        "tokens": ["–" if c.tokens is None else f"{c.tokens[0]} + {c.tokens[1]}" for c in calls],
        "seconds": [_cell("seconds", c.ended_at and c.ended_at - c.started_at) for c in calls],
        "verdict": [
            str(c.skip_reason or ("–" if c.trained_step is None else f"step {c.trained_step}"))
            for c in calls
        ],
        "asked": [prompt_excerpt(call.request) for call in calls],
        "answer": [excerpt(call.error or "") or answer_excerpt(call.response) for call in calls],
    }
    expendable = ("asked", "verdict", "adapter", "seconds", "model", "tokens", "started")
    return fitted(columns, width, expendable, cut_last=True)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    return format(value, _FORMS[name]) if name in _FORMS else excerpt(str(value))
