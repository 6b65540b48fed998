"""What a run's agents do at this moment, and what failed last."""

from __future__ import annotations

import json
from dataclasses import dataclass

from agentrl.runs.excerpts import excerpt
from agentrl_tracer.schemas import AttemptState
from agentrl_tracer.store import Store

_RUNNING = (AttemptState.RUNNING,)
_FAILED = tuple(
    state
    for state in AttemptState
    if state not in (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
)


@dataclass(frozen=True)
class Failure:
    """An attempt that failed; ``error`` is the last line of what it said, or its state."""

    attempt: str
    rollout: str
    step: int
    error: str


@dataclass(frozen=True)
class Activity:
    """``longest_since`` is when the attempt began that has run longest, in seconds since 1970, and
    ``longest_task`` its split, place and data in one line."""

    running: int = 0
    longest_since: float | None = None
    longest_task: str = ""
    failures: tuple[Failure, ...] = ()
    """The newest first."""


def activity_of(store: Store, run_id: str, since_step: int, failures: int = 3) -> Activity:
    """Return the activity of a run.

    Args:
        since_step: failures of earlier steps are left out.
        failures: how many to return at most.
    """
    failed = tuple(
        Failure(attempt.id, attempt.rollout_id, rollout.step, _last_line(attempt.error or state))
        for rollout, attempt in store.newest_attempts(run_id, _FAILED, since_step, failures)
        for state in [attempt.state]
    )
    running = store.newest_attempts(run_id, _RUNNING, 0)
    if not running:
        return Activity(failures=failed)
    rollout, attempt = running[-1]
    split, place = rollout.task_id.split("-")[-2:]
    task = json.dumps(store.task(run_id, split, int(place)), ensure_ascii=False)
    name = excerpt(f"{split} {place}: {task}")
    return Activity(len(running), attempt.started_at, name, failed)


def _last_line(error: str) -> str:
    return excerpt((error.strip() or error).splitlines()[-1])
