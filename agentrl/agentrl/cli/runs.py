"""``agentrl runs``: list the runs in a folder, show one, verify one's calls."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError
from agentrl.console.output import console, print_block, print_line
from agentrl.console.report import Metrics, runs_table, show_run, show_verified
from agentrl.console.trace_tree import rollout_trace
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import how_to_continue, open_store, state_of
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import StoreError

_PATIENCE_S = 10.0  # for each of many stores


def list_command(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    found: list[tuple[Json, str, Metrics]] = []
    advice: list[str] = []
    faults: list[str] = []
    for name in sorted(os.listdir(runs)) if runs.exists() else ():
        folder = RunFolder(runs / name)
        try:
            # Listed, because ``exists`` is False for a folder that may not be looked into.
            if not (folder.root.is_dir() and os.listdir(folder.root) and folder.exists()):
                continue
            store, run = open_store(folder, _PATIENCE_S)
            with contextlib.closing(store):
                state = state_of(folder, run)
                found.append((run, state, store.metrics(run["id"])))
        except (StoreError, ConfigError, MissingSecretError, OSError) as error:
            faults.append(f"{folder.root}: {error}")
            continue
        if state == "interrupted" and run["kind"] == "train":
            advice.append(f"{folder.name} was interrupted; {how_to_continue(folder)}")
    if found:
        print_block(runs_table(found, console.width))
    elif not faults:
        print_line(f"no runs in {runs}")
    for line in advice:
        print_line(line)
    if faults:  # after the others
        raise StoreError("\n".join(faults))


def show_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    rollout: Annotated[str | None, Parameter(help="Show the trace of this rollout.")] = None,
) -> None:
    """Show a run's steps and where its calls went, or the trace of one of its rollouts."""
    folder = RunFolder.existing(run, "run")
    store, found_run = open_store(folder)
    with contextlib.closing(store):
        if rollout is None:
            state = state_of(folder, found_run)
            show_run(console, store, found_run, state, how_to_continue(folder))
            return
        found = store.rollouts(found_run["id"], ids=[rollout])
        if not found:
            raise ConfigError(f"rollout: {rollout!r} is no rollout of {folder.name}")
        print_block(rollout_trace(store, found[0]))


def verify_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
) -> None:
    """Count a run's calls one by one, and compare them with its sums; the exit code is 1 if not."""
    store, found = open_store(RunFolder.existing(run, "run"))
    with contextlib.closing(store):
        verified = store.verify(found["id"])
    show_verified(console, verified)
    if verified.fault:
        sys.exit(1)
