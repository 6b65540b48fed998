"""What a sweep has found so far, as ``sweep.json`` in its folder: pages and pictures read it.

It follows from the study, and needs no Optuna to be read.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder

_FILE = "sweep.json"


@dataclass
class TrialRow:
    number: int
    state: str
    """running, complete, pruned or failed."""
    params: dict[str, Any]
    runs: list[str]
    """Names of its runs that were begun, one for each seed."""
    value: float | None = None
    """The metric, the mean over the seeds; of a trial that is not complete its last."""
    spread: float | None = None
    """Standard deviation over the seeds; None for one seed."""
    step: int = 0
    reason: str = ""
    """Why it failed."""


@dataclass
class SweepRecord:
    """A sweep. ``space`` has the fields of ``Dimension``; ``importance`` is empty at first."""

    name: str
    metric: str
    direction: str
    total: int
    space: list[dict[str, Any]]
    trials: list[TrialRow] = field(default_factory=list[TrialRow])
    importance: dict[str, float] = field(default_factory=dict[str, float])
    best_command: str = ""
    state: str = ""
    """running, finished or interrupted; of the folder, not of the file."""
    version: str = ""
    """What differs once there is something new."""

    @property
    def complete(self) -> list[TrialRow]:
        return [one for one in self.trials if one.state == "complete" and one.value is not None]

    @property
    def best(self) -> TrialRow | None:
        return next(iter(self.ranked()[: len(self.complete)]), None)

    def ranked(self) -> list[TrialRow]:
        """Return the trials, the best complete one first, then the others by number."""
        sign = -1 if self.direction == "maximize" else 1
        known = sorted(self.complete, key=lambda one: (sign * (one.value or 0.0), one.number))
        return known + [one for one in self.trials if one not in known]


def short_names(record: SweepRecord) -> dict[str, str]:
    """Return the last part of each setting's name; the whole name where two would be the same."""
    names = [one["name"] for one in record.space]
    last = [name.rpartition(".")[2] for name in names]
    found = zip(names, last, strict=True)
    return {name: end if last.count(end) == 1 else name for name, end in found}


def write_record(folder: RunFolder, record: SweepRecord) -> None:
    folder.write_json(folder.root / _FILE, asdict(record))


def read_record(root: Path, name: str) -> SweepRecord:
    """Read the sweep ``name`` below the folder ``root``.

    Raises:
        ConfigError: there is none, or its file is damaged.
    """
    folder = RunFolder(root / name)
    if name != os.path.basename(name) or not (folder.root / _FILE).is_file():
        raise ConfigError(f"sweep: there is no sweep {name!r} in {root}")
    try:
        given = json.loads((folder.root / _FILE).read_text(encoding="utf-8"))
        record = SweepRecord(**given | {"trials": [TrialRow(**one) for one in given["trials"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"sweep: {folder.root / _FILE} is damaged: {error}") from error
    ended = sum(one.state != "running" for one in record.trials) >= record.total
    record.state = "finished" if ended else "running" if folder.is_in_use() else "interrupted"
    record.version = f"{(folder.root / _FILE).stat().st_mtime_ns}-{record.state}"
    return record


def sweeps_in(root: Path) -> list[str]:
    """Return the names of the sweeps below a folder, the one changed last first."""
    found: list[tuple[float, str]] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root):
            with contextlib.suppress(OSError):
                found.append((-os.stat(Path(entry.path, _FILE)).st_mtime, entry.name))
    return [name for _, name in sorted(found)]
