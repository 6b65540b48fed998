"""Open the runs that commands name."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError
from agentrl.console.output import stderr
from agentrl.history.sources import OpenRun, open_run
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError

_PATIENCE_S = 10.0  # for each of many stores

RunPath = Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")]
RunsPath = Annotated[Path, Parameter(help="Folder of run folders.")]
Where = Annotated[str, Parameter(help="Which rollouts, such as 'reward < 0 and step > 10'.")]
AsJson = Annotated[bool, Parameter(name="--json", help="One JSON object a line.")]


@contextlib.contextmanager
def indexed_run(path: Path) -> Iterator[OpenRun]:
    """Open a run with its index brought up to date: of many new rollouts it takes minutes.

    Raises:
        ConfigError: there is no such run.
        StoreError: the store is away, or the index cannot be written beside the run.
    """
    with contextlib.closing(open_run(RunFolder.existing(path, "run"))) as run:
        try:
            with stderr.status("reading new rollouts"):  # shows nothing in a pipe
                while run.fill():
                    pass
        except sqlite3.OperationalError as error:
            raise StoreError(
                f"{run.index.path}: {error}; this user must find room and be allowed to write there"
            ) from error
        yield run


def each_run(runs: Path, faults: list[str]) -> Iterator[tuple[RunFolder, Store, Json]]:
    """Yield the runs of a folder, each with its row and its store, which is open until the next.

    Args:
        faults: what is wrong with a run that cannot be opened is added here.
    """
    for name in sorted(os.listdir(runs)) if runs.exists() else ():
        folder = RunFolder(runs / name)
        try:
            # Listed, because ``exists`` is False for a folder that may not be looked into.
            if not (folder.root.is_dir() and os.listdir(folder.root) and folder.exists()):
                continue
            store, row = open_store(folder, _PATIENCE_S)
        except (StoreError, ConfigError, MissingSecretError, OSError) as error:
            faults.append(f"{folder.root}: {error}")
            continue
        with contextlib.closing(store):
            yield folder, store, row
