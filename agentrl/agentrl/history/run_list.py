"""List runs with what tells them apart, without opening those that have ended again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError
from agentrl.history.notes import Notes, read_notes
from agentrl.history.overview import Progress, progress_of
from agentrl.history.sources import OpenRun, Sources
from agentrl.runs.circumstances import why_failed
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import StoreError

_POINTS = 100
"""Of a curve, about."""
_CHANGE = ("lock", "config.json", "metrics.jsonl", "summary.json", "failed.json")
"""Files of which a run that goes on changes one."""


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    kind: str
    state: str
    why: str | None
    """Why it failed."""
    created_at: float
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
        runs: list[Listed] = []
        elsewhere, faults = self._sources.in_stores()
        for name in [*self._sources.names(), *elsewhere]:
            try:
                runs.append(self._one(name, elsewhere.get(name)))
            except (StoreError, ConfigError, MissingSecretError, OSError) as error:
                faults.append(f"{name}: {error}")
        return sorted(runs, key=lambda run: -run.created_at), faults

    def _one(self, name: str, row: Json | None) -> Listed:
        folder = RunFolder(self._sources.root / name)
        changed = row or [_changed(folder, file) for file in _CHANGE]
        known = self._ended.get(name)
        if known is not None and known[0] == changed:
            return replace(known[1], notes=read_notes(known[2]))
        run = self._sources.open(name)
        found = listed(run)
        if found.state != "running":
            self._ended[name] = changed, found, run.folder
        return found


def _changed(folder: RunFolder, file: str) -> int | None:
    try:
        return (folder.root / file).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def listed(run: OpenRun) -> Listed:
    """Return what tells a run apart in a list."""
    row, every = run.current(), -(-(run.store.last_step(run.id) or 1) // _POINTS)
    metrics = run.store.metrics(run.id, (REWARD, HELD_OUT), every=every)
    rewards, held_out = (
        [values[name] for values in metrics.values() if name in values]
        for name in (REWARD, HELD_OUT)
    )
    state = row["state"]
    why = why_failed(run.folder) if state == "failed" else None
    return Listed(
        run.name, row["kind"], state, why, row["created_at"], progress_of(run, state),
        rewards, held_out, read_notes(run.folder),
    )  # fmt: skip
