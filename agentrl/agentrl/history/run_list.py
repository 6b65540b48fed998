"""List runs with what tells them apart, without opening those that have ended again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config.setting_names import recorded
from agentrl.history.notes import Notes, read_notes
from agentrl.history.overview import Progress, progress_of
from agentrl.history.sources import OpenRun, Sources
from agentrl.runs.circumstances import why_failed
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl_tracer.schemas import Json

_POINTS = 100
"""Of a curve, about."""
_CHANGE = ("lock", "config.json", "metrics.jsonl", "summary.json", "failed.json", "pruned")
"""Files of which a run that goes on changes one."""


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    id: str
    kind: str
    model: str | None
    state: str
    why: str | None
    """Why it failed."""
    created_at: float
    ended_at: float | None
    folder: str | None
    """None if it is not on this machine: that of a run of a PostgreSQL store."""
    progress: Progress
    rewards: list[float]
    held_out: list[float]
    notes: Notes

    def matches(self, text: str, state: str, tag: str, archived: bool) -> bool:
        """Tell whether the run is to be shown; an empty filter leaves none out."""
        return (
            all(word in f"{self.name} {self.notes.note}".lower() for word in text.lower().split())
            and state in ("", self.state)
            and (not tag or tag in self.notes.tags)
            and self.notes.archived == archived
        )


class RunList:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._ended: dict[str, tuple[object, Listed, RunFolder]] = {}

    def all(self) -> tuple[list[Listed], list[str]]:
        """Return every run, newest first, and a sentence for each that cannot be opened."""
        runs, faults = self._sources.each(self._one)
        return sorted(runs, key=lambda run: -run.created_at), faults

    def _one(self, name: str, row: Json | None) -> Listed:
        changed = row or [_changed(self._sources.root / name / file) for file in _CHANGE]
        before, known, folder = self._ended.get(name, (None, None, None))
        if known and folder and before == changed:
            return replace(known, notes=read_notes(folder))
        run = self._sources.open(name)
        found = listed(run)
        if found.state != "running":
            self._ended[name] = changed, found, run.folder
        return found


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def listed(run: OpenRun) -> Listed:
    """Return what tells a run apart in a list."""
    row, every = run.current(), -(-(run.store.last_step(run.id) or 1) // _POINTS)
    metrics = run.store.metrics(run.id, (REWARD, HELD_OUT), every=every).values()
    return Listed(
        run.name, run.id, row["kind"], recorded(row["config"], "model.name"), row["state"],
        why_failed(run.folder), row["created_at"], row["ended_at"],
        str(run.folder.root) if run.folder.exists() else None, progress_of(run, row["state"]),
        [row[REWARD] for row in metrics if REWARD in row],
        [row[HELD_OUT] for row in metrics if HELD_OUT in row], read_notes(run.folder),
    )  # fmt: skip
