"""``agentrl runs rollouts``, ``rollout`` and ``calls``: find rollouts and calls, show them."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.cli.runs.opening import AsJson, RunPath, RunsPath, Where, each_run, indexed_run
from agentrl.config.errors import ConfigError
from agentrl.config.secrets import store_url
from agentrl.console.output import console, print_block, print_json, print_line
from agentrl.console.rollouts import calls_table, rollouts_table
from agentrl.console.trace_tree import rollout_trace
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store
from agentrl_tracer.store import Store, StoreError

Limit = Annotated[int, Parameter(help="How many at most; 0 is all.")]


def rollouts_command(
    run: RunPath,
    *,
    where: Where = "",
    search: Annotated[str, Parameter(help="Words that the messages have, all of them.")] = "",
    sort: Annotated[
        str,
        Parameter(help="A column; with - in front the largest first.", allow_leading_hyphen=True),
    ] = "",
    limit: Limit = 50,
    json: AsJson = False,
) -> None:
    """List the rollouts of a run that match."""
    with indexed_run(run) as opened:
        found = find_rollouts(opened.index, Query(where, search, sort, limit or -1))
    if json:
        for row in found.rows:
            print_json(row)
        return
    if found.rows:
        print_block(rollouts_table(found.rows, console.width))
    if len(found.rows) < found.total or not found.rows:
        print_line(f"{len(found.rows)} of {found.total:,} rollouts")


def rollout_command(
    rollout: Annotated[str, Parameter(help="Id of a rollout, as `runs rollouts` shows it.")],
    *,
    runs: RunsPath = Path("runs"),
) -> None:
    """Show the trace of a rollout of any run: attempts, spans, calls, rewards and outputs."""
    faults: list[str] = []
    for _, store, row in each_run(runs, faults):
        if found := store.rollouts(row["id"], ids=[rollout]):
            print_block(rollout_trace(store, found[0]))
            return
    if faults:
        raise StoreError("\n".join([f"no other run in {runs} has it:", *faults]))
    raise ConfigError(f"rollout: {rollout!r} is no rollout of a run in {runs}; --runs names others")


def calls_command(
    run: Annotated[Path | None, Parameter(help="Run folder, for instance runs/hello.")] = None,
    *,
    served: Annotated[bool, Parameter(help="What `agentrl serve` recorded.")] = False,
    store: Annotated[str, Parameter(help="Where it recorded: `run.store` of the server.")] = (
        "runs/serve.db"
    ),
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """List the newest calls of a run, or those that `agentrl serve` answered."""
    if served == (run is not None):
        raise ConfigError("run: give a run folder, or --served for what `agentrl serve` recorded")
    run_id = None
    if run is not None:
        opened, row = open_store(RunFolder.existing(run, "run"))
        run_id = row["id"]
    elif "://" in store or Path(store).is_file():  # else it would be made
        opened = Store(store_url(store))
    else:
        raise ConfigError(f"store: {store} is not there; `agentrl serve` makes it")
    with contextlib.closing(opened):
        calls = opened.newest_calls(run_id, limit or None)
    if json:
        for call in calls:
            print_json(asdict(call))
    elif calls:
        print_block(calls_table(calls, console.width))
    else:
        print_line("no calls yet")
