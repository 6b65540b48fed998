"""One trial: its runs, one for each seed, and the process that trains them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError
from agentrl.process_privacy import open_private
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of
from agentrl_tracer.store import StoreError

if TYPE_CHECKING:
    import optuna

_PATIENCE_S = 2.0
_MOST_STARTS = 4
"""Processes of one run that this sweep starts: something kills them."""


@dataclass(eq=False)
class RunningTrial:
    """A trial that has not ended.

    Args:
        runs: a folder for each seed; the first ones may be there from before a kill.
        config: file of its settings.
        flags: more of them, for its first start.
    """

    study: optuna.Trial
    params: Mapping[str, Any]
    runs: Sequence[RunFolder]
    config: Path
    flags: Sequence[str]
    first_seed: int
    at: int = 0
    """Which of the runs is under way."""
    process: subprocess.Popen[bytes] | None = None
    code: int = 0
    """How its last process ended; negative for a signal."""
    starts: int = 0
    pruned: bool = False
    values: list[float] = field(default_factory=list[float])
    """The metric's last value of each run that has ended."""
    last: tuple[int, float] | None = None
    """Step and value of the metric in the run under way."""

    @property
    def number(self) -> int:
        return self.study.number

    @property
    def run(self) -> RunFolder:
        return self.runs[self.at]

    @property
    def log(self) -> Path:
        return self.config.with_name(f"{self.run.name}.log")

    def state(self) -> str:
        """Return the state of the run under way; empty: it was not begun.

        It is running as long as another process holds it, such as one of a sweep that was killed.
        """
        if self.run.is_in_use():
            return "running"
        if not self.run.exists():
            return ""
        try:
            store, row = open_store(self.run, _PATIENCE_S, read_only=True)
        except StoreError:
            return "running"
        with contextlib.closing(store):
            return state_of(self.run, row)

    def start(self, hidden: Sequence[str]) -> None:
        """Start the run under way, or continue it.

        Args:
            hidden: environment variables of the settings that the sweep chooses.
        """
        self.starts += 1
        if self.run.exists():
            what = ["--resume", str(self.run.root)]
        else:
            place = ["--name", self.run.name, "--runs", str(self.run.root.parent)]
            seed = ["--seed", str(self.first_seed + self.at)]
            what = ["--config", str(self.config), *place, *seed, *self.flags]
        with open_private(self.log) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.sweep.process", "train", *what],
                stdin=subprocess.PIPE,  # it ends when this end closes
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in hidden},
                start_new_session=True,  # Ctrl-C reaches the sweep only
            )

    def next_run(self) -> bool:
        """Go to the next seed; False: this was the last."""
        self.at, self.starts, self.code, self.last = self.at + 1, 0, 0, None
        return self.at < len(self.runs)

    def hopeless(self, state: str) -> str:
        """Say why the run cannot go on; empty if it can."""
        if state == "failed" or (not state and self.code > 0):
            lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
            said = [line for line in lines if line.startswith("error: ")]
            return said[-1] if said else f"its run failed; see {self.log}"
        if self.starts >= _MOST_STARTS:
            return f"its process was ended {self.starts} times; see {self.log}"
        return ""

    def rows(self, metric: str) -> list[tuple[int, float]]:
        """Return the metric of the run under way by step, without the one before training.

        Raises:
            ConfigError: the run has ended and no row has the metric.
        """
        rows = self.run.read_metrics()
        found = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
        if not found and self.process is None and not any(metric in row for row in rows):
            names = sorted({name for row in rows for name in row} - {"step"})
            raise ConfigError(
                f"sweep.metric: {self.run.name} has no {metric!r}; it has {', '.join(names)}"
            )
        return sorted((int(step), value) for step, value in found.items() if step)
