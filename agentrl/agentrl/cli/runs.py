"""``agentrl runs``: list the runs in a folder, show one, verify one's calls."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.console.output import console
from agentrl.console.report import Metrics, runs_table, show_run, show_verified
from agentrl.console.trace_tree import rollout_tree
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError

_PATIENCE_S = 10.0  # for each of many stores


def list_command(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    found: list[tuple[Json, Metrics]] = []
    faults: list[str] = []
    for path in sorted(runs.glob("*/store.db")):
        try:
            with contextlib.closing(Store(str(path), patience_s=_PATIENCE_S)) as store:
                found += [(run, store.metrics(run["id"])) for run in store.runs()]
        except StoreError as error:
            faults.append(str(error))
    if found or not faults:
        console.print(runs_table(found) if found else f"no runs in {runs}")
    if faults:  # after the others
        raise StoreError("\n".join(faults))


def show_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    rollout: Annotated[str | None, Parameter(help="Show the trace of this rollout.")] = None,
) -> None:
    """Show a run's steps and where its calls went, or the trace of one of its rollouts."""
    folder = RunFolder.existing(run)
    with contextlib.closing(_store_of(folder)) as store:
        run_id = folder.run_id.read_text().strip()
        if rollout is None:
            show_run(console, store, run_id)
            return
        found = store.rollouts(run_id, ids=[rollout])
        if not found:
            raise ConfigError(f"rollout: {rollout!r} is no rollout of {folder.name}")
        console.print(rollout_tree(store, found[0]))


def verify_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
) -> None:
    """Count a run's calls one by one, and compare them with its sums; the exit code is 1 if not."""
    folder = RunFolder.existing(run)
    with contextlib.closing(_store_of(folder)) as store:
        verified = store.verify(folder.run_id.read_text().strip())
    show_verified(console, verified)
    if verified.fault:
        sys.exit(1)


def _store_of(folder: RunFolder) -> Store:
    config = folder.read_config()
    shared = recorded(config, "run.store", config.get("store"))  # flat in earlier versions
    return Store(shared or str(folder.store))
