"""What a run's overview says beyond its metrics: how far it is, intervals, phases, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from agentrl.config.setting_names import recorded
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import circumstances
from agentrl.runs.statistics import task_interval
from agentrl_tracer.schemas import Json

_LAST_STEPS = 12
"""Steps that a timeline shows, and from which the remaining time is estimated."""
_DONE = "seconds/publish"
"""Logged last of a step."""

_IN_TURN = ("publish", "checkpoint", "update")
"""Phases that end one when the next begins, the last first."""

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
    ends = list(run.store.logged_at(run.id, _DONE, _LAST_STEPS).values())
    took = [later - earlier for earlier, later in pairwise(ends)]
    return Progress(step, steps, median(took) * (steps - step) if took else None)


def held_out_intervals(run: OpenRun, success: float) -> dict[int, tuple[float, float]]:
    """Return the 95 % interval of the success rate of each evaluation that is indexed, by step."""
    query = (
        "SELECT step, avg(coalesce(reward >= ?, 0)), count(*) FROM rollout "
        "WHERE purpose = 'eval' AND status != 'cancelled' GROUP BY step, task"
    )
    tasks: dict[int, list[tuple[float, int]]] = {}
    with run.index.read() as db:
        for step, rate, samples in db.execute(query, (success,)):
            tasks.setdefault(step, []).append((rate, samples))
    return {
        step: task_interval([rate for rate, _ in found], max(samples for _, samples in found))
        for step, found in tasks.items()
    }


def phase_spans(run: OpenRun) -> list[Span]:
    """Return when the phases of the last steps were: rollouts as they ran, the rest as logged."""
    ends = run.store.logged_at(run.id, _DONE, _LAST_STEPS)
    evaluated = run.store.logged_at(run.id, "seconds/evaluation", _LAST_STEPS)
    names = [f"seconds/{phase}" for phase in (*_IN_TURN, "evaluation")]
    rows = run.store.metrics(run.id, names, since=min([*ends, *evaluated], default=0))
    spans = [span for step, end in ends.items() for span in _of_step(step, end, rows[step])]
    spans += [
        ("evaluation", end - rows[step]["seconds/evaluation"], end, f"step {step}")
        for step, end in evaluated.items()
    ]
    query = (
        "SELECT step, min(started_at), max(started_at + coalesce(seconds, 0)) FROM rollout "
        "WHERE purpose = 'train' AND step BETWEEN ? AND ? GROUP BY step"
    )
    if ends:
        with run.index.read() as db:
            for step, start, end in db.execute(query, (min(ends), max(ends) + 1)):
                if start is not None and end > start:
                    spans.append(("rollouts", start, end, f"step {step}"))
    first = min((start for _, start, _, _ in spans), default=0.0)
    return sorted((lane, start - first, end - first, label) for lane, start, end, label in spans)


def _of_step(step: int, end: float, row: Mapping[str, float]) -> list[Span]:
    spans: list[Span] = []
    for phase in _IN_TURN:
        seconds = row.get(f"seconds/{phase}", 0.0)
        spans.append((phase, end - seconds, end, f"step {step}"))
        end -= seconds
    return spans


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


def share_by_phase(
    metrics: Mapping[int, Mapping[str, float]], phases: Sequence[str]
) -> dict[str, float]:
    """Return each phase's share of the time of all phases, over the steps in ``metrics``."""
    seconds: dict[str, float] = {
        phase: sum(row.get(f"seconds/{phase}", 0.0) for row in metrics.values()) for phase in phases
    }
    total = sum(seconds.values())
    return {phase: value / total for phase, value in seconds.items()} if total else {}
