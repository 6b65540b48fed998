"""``agentrl runs``: list the runs in a folder, show one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.console.output import console
from agentrl.console.report import Metrics, runs_table, show_run
from agentrl.console.trace_tree import rollout_tree
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store


def list_command(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    found: list[tuple[Json, Metrics]] = []
    for path in sorted(runs.glob("*/store.db")):
        with contextlib.closing(Store(str(path))) as store:
            found += [(run, store.metrics(run["id"])) for run in store.runs()]
    console.print(runs_table(found) if found else f"no runs in {runs}")


def show_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    rollout: Annotated[str | None, Parameter(help="Show the trace of this rollout.")] = None,
) -> None:
    """Show a run's steps and where its calls went, or the trace of one of its rollouts."""
    folder = RunFolder.existing(run)
    config, run_id = folder.read_config(), folder.run_id.read_text().strip()
    shared = recorded(config, "run.store", config.get("store"))  # flat in earlier versions
    with contextlib.closing(Store(shared or str(folder.store))) as store:
        if rollout is None:
            show_run(console, store, run_id)
            return
        found = store.rollouts(run_id, ids=[rollout])
        if not found:
            raise ConfigError(f"rollout: {rollout!r} is no rollout of {folder.name}")
        console.print(rollout_tree(store, found[0]))
