"""``agentrl runs``: list the runs in a folder, show one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.config.recorded import recorded
from agentrl.console.output import console
from agentrl.console.report import runs_table, show_run
from agentrl.console.trace_tree import rollout_tree
from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store


def list_command(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    found: list[dict[str, Any]] = []
    metrics: list[dict[int, dict[str, float]]] = []
    for path in sorted(runs.glob("*/store.db")):
        store = Store(str(path))
        for run in store.runs():
            found.append(run)
            metrics.append(store.metrics(run["id"]))
        store.close()
    console.print(runs_table(found, metrics) if found else f"no runs in {runs}")


def show_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    rollout: Annotated[str | None, Parameter(help="Show the trace of this rollout.")] = None,
) -> None:
    """Show a run's steps and where its calls went, or the trace of one of its rollouts."""
    folder = RunFolder.existing(run)
    store = Store(recorded(folder.read_config(), "run.store") or str(folder.store))
    run_id = folder.run_id.read_text().strip()
    if rollout is not None:
        found = store.rollouts(run_id, ids=[rollout])
        if not found:
            raise ConfigError(f"rollout: {rollout!r} is no rollout of {folder.name}")
        console.print(rollout_tree(store, found[0]))
    else:
        row = next(r for r in store.runs() if r["id"] == run_id)
        metrics, sums = store.metrics(run_id), store.accounting(run_id)
        show_run(console, row, metrics, sums, store.outcomes(run_id), store.continuity(run_id))
    store.close()
