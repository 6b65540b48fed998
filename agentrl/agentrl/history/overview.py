"""What a run's overview says beyond its metrics: how far it is, phases, failures, activity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from agentrl.config.setting_names import recorded
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import circumstances
from agentrl.runs.excerpts import excerpt
from agentrl_tracer.schemas import Attempt, AttemptState, Json, Rollout
from agentrl_tracer.store import Store

_LAST_STEPS = 12
"""Steps that a timeline shows, and from which the remaining time is estimated."""
_DONE, _EVALUATED = "seconds/publish", "seconds/evaluation"
"""Logged last of a step, and of an evaluation."""
_IN_TURN = ("publish", "checkpoint", "update")
"""Phases that end one when the next begins, the last first."""
_NOT_FAILED = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
_FAILED = [state for state in AttemptState if state not in _NOT_FAILED]

Span = tuple[str, float, float, str]
"""Lane, start and end in seconds since the first, and label."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    steps: int | None
    """The last one that is planned; None: not recorded."""
    seconds_left: float | None = None
    """While it runs: the median duration of the last steps, times those that are left."""

    @property
    def share(self) -> float | None:
        return min(self.step / self.steps, 1.0) if self.steps else None


def progress_of(run: OpenRun, state: str) -> Progress:
    """Return how far a run is, and when it will be done if its last steps are typical."""
    step = run.store.last_step(run.id) or 0
    steps = circumstances(run.folder).get("steps") or recorded(run.row["config"], "run.steps", None)
    if state != "running" or not steps:
        return Progress(step, steps)
    ends = run.store.logged_at(run.id, _DONE, _LAST_STEPS).values()
    took = [later - earlier for earlier, later in pairwise(ends)]
    return Progress(step, steps, median(took) * (steps - step) if took else None)


def phase_spans(run: OpenRun) -> list[Span]:
    """Return when the phases of the last steps were: rollouts as they ran, the rest as logged."""
    spans = list(_logged_spans(run.store, run.id))
    query = (
        "SELECT 'rollouts', min(started_at), max(started_at + coalesce(seconds, 0)), step "
        "FROM rollout WHERE purpose = 'train' AND step BETWEEN ? AND ? AND started_at > 0 "
        "GROUP BY step"
    )
    if steps := [step for *_, step in spans]:
        with run.index.read() as db:
            spans += map(tuple, db.execute(query, (min(steps), max(steps) + 1)))
    first = min((start for _, start, *_ in spans), default=0.0)
    return sorted(
        (lane, start - first, end - first, f"step {step}") for lane, start, end, step in spans
    )


def _logged_spans(store: Store, run_id: str) -> Iterator[tuple[str, float, float, int]]:
    """Yield lane, start, end and step."""
    done, evaluated = (store.logged_at(run_id, what, _LAST_STEPS) for what in (_DONE, _EVALUATED))
    names = [_EVALUATED, *(f"seconds/{phase}" for phase in _IN_TURN)]
    rows = store.metrics(run_id, names, since=min([*done, *evaluated], default=0))
    for step, end in evaluated.items():
        yield "evaluation", end - rows[step][_EVALUATED], end, step
    for step, end in done.items():
        for phase in _IN_TURN:
            start = end - rows[step].get(f"seconds/{phase}", 0.0)
            yield phase, start, end, step
            end = start


def outcomes_of(run: OpenRun) -> tuple[dict[str, int], list[Json]]:
    """Return how many rollouts have each status, and the newest that failed."""
    failed = "SELECT id, step, task, error FROM rollout WHERE status = 'failed' ORDER BY id DESC"
    with run.index.read() as db:
        counts = dict(db.execute("SELECT status, count(*) FROM rollout GROUP BY status").fetchall())
        return counts, [dict(row) for row in db.execute(f"{failed} LIMIT 5")]


def alerts_of(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, list[int]]:
    """Return the steps at which each alert held."""
    found: dict[str, list[int]] = {}
    for step, row in metrics.items():
        for name in row:
            if "alert/" in name:
                found.setdefault(name.replace("alert/", ""), []).append(step)
    return found


def share_by_phase(run: OpenRun, phases: Sequence[str]) -> dict[str, float]:
    """Return each phase's share of the time of all phases, over all steps."""
    sums = run.store.metric_sums(run.id, [f"seconds/{phase}" for phase in phases])
    seconds = {phase: sums.get(f"seconds/{phase}", 0.0) for phase in phases}
    total = sum(seconds.values())
    return {phase: value / total for phase, value in seconds.items()} if total else {}


@dataclass(frozen=True)
class Activity:
    """What a run's agents do at this moment, and what failed last."""

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
