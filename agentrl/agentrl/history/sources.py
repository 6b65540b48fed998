"""Find the runs below a folder, and open their stores read-only."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError
from agentrl.history.index import RolloutIndex
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError
from agentrl_tracer.store.faults import PATIENCE_S

_PATIENCE_S = 2.0  # for a database that is away: a page must answer
_MOST_OPEN = 16


@dataclass(frozen=True)
class OpenRun:
    """A run, its store, and the index beside it. ``row`` is the run's row as of the opening."""

    folder: RunFolder
    store: Store
    row: Json
    index: RolloutIndex

    @property
    def id(self) -> str:
        return self.row["id"]

    @property
    def name(self) -> str:
        return self.folder.name

    def current(self) -> Json:
        """Return the run's row as it is now: ``state`` by ``state_of``, ``name`` of its folder."""
        [row] = [row for row in self.store.runs() if row["id"] == self.id]
        return row | {"state": state_of(self.folder, row), "name": self.name}

    def close(self) -> None:
        self.index.close()
        self.store.close()


def open_run(folder: RunFolder, patience_s: float = PATIENCE_S) -> OpenRun:
    """Open a run read-only; raises what ``Sources.open`` raises."""
    store, row = open_store(folder, patience_s, read_only=True)
    return OpenRun(folder, store, row, RolloutIndex(folder.root / "view.db"))


class Sources:
    """The runs below a folder. Thread-safe; the runs used last stay open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()

    def names(self) -> list[str]:
        """Return the names of the folders that hold a run, in order."""
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.root)):
                with contextlib.suppress(OSError):
                    if RunFolder(self.root / name).exists():
                        found.append(name)
        return found

    def open(self, name: str) -> OpenRun:
        """Open a run by the name of its folder.

        Raises:
            ConfigError: there is no such run, or its store is not there.
            StoreError: the store is away.
            MissingSecretError: its password is not in the environment.
        """
        with self._lock:
            if (known := self._open.get(name)) is not None:
                self._open.move_to_end(name)
                return known
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise ConfigError(f"run: {name!r} is no name of a folder")
            opened = open_run(RunFolder.existing(self.root / name, "run"), _PATIENCE_S)
            self._open[name] = opened
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return opened

    def all(self) -> tuple[list[OpenRun], list[str]]:
        """Return every run, newest first, and a sentence for each that cannot be opened."""
        runs: list[OpenRun] = []
        faults: list[str] = []
        for name in self.names():
            try:
                runs.append(self.open(name))
            except (StoreError, ConfigError, MissingSecretError, OSError) as error:
                faults.append(f"{name}: {error}")
        return sorted(runs, key=lambda run: -run.row["created_at"]), faults

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
