"""What a run's agents do at this moment, and what failed last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.runs.excerpts import excerpt
from agentrl_tracer.schemas import Attempt, AttemptState, Rollout
from agentrl_tracer.store import Store

_NOT_FAILED = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
_FAILED = [state for state in AttemptState if state not in _NOT_FAILED]


@dataclass(frozen=True)
class Activity:
    running: int = 0
    longest_since: float | None = None
    """When the attempt began that has run longest."""
    longest_task: str = ""
    """Its split, place and data, in one line."""
    failures: Sequence[tuple[Rollout, Attempt]] = ()
    """The newest first."""


def activity_of(store: Store, run_id: str, since_step: int, failures: int) -> Activity:
    """Return the activity of a run in ``since_step`` and later, with so many failures at most."""
    failed = store.newest_attempts(run_id, _FAILED, since_step, failures)
    running = store.newest_attempts(run_id, [AttemptState.RUNNING], since_step)
    if not running:
        return Activity(failures=failed)
    rollout, attempt = running[-1]
    split, place = rollout.task_id.split("-")[-2:]
    task = json.dumps(store.task(run_id, split, int(place)), ensure_ascii=False)
    return Activity(len(running), attempt.started_at, excerpt(f"{split} {place}: {task}"), failed)
