"""``agentrl runs list``, ``show`` and ``verify``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from agentrl.cli.runs.opening import AsJson, RunPath, RunsPath, each_run
from agentrl.config.setting_names import recorded
from agentrl.console.evaluations import show_evaluations
from agentrl.console.output import console, print_block, print_json, print_line
from agentrl.console.report import Metrics, runs_table, show_run, show_verified
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.runs.recorded import how_to_continue, open_store, state_of
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import StoreError


def list_command(runs: RunsPath = Path("runs"), *, json: AsJson = False) -> None:
    """List the runs in a folder."""
    found: list[tuple[Json, str, Metrics]] = []
    advice: list[str] = []
    faults: list[str] = []
    for folder, store, row in each_run(runs, faults):
        try:
            state, metrics = state_of(folder, row), store.metrics(row["id"])
        except StoreError as error:
            faults.append(f"{folder.root}: {error}")
            continue
        found.append((row | {"name": folder.name}, state, metrics))
        if state == "interrupted" and row["kind"] == "train":
            advice.append(f"{folder.name} was interrupted; {how_to_continue(folder)}")
        if json:
            print_json(_listed(folder, row, state, metrics))
    if not json:
        if found:
            print_block(runs_table(found, console.width))
        elif not faults:
            print_line(f"no runs in {runs}")
        for line in advice:
            print_line(line)
    if faults:  # after the others
        raise StoreError("\n".join(faults))


def _listed(folder: RunFolder, row: Json, state: str, metrics: Metrics) -> Json:
    newest = {name: value for values in metrics.values() for name, value in values.items()}
    return {
        "name": folder.name,
        "folder": str(folder.root),
        "id": row["id"],
        "kind": row["kind"],
        "state": state,
        "model": recorded(row["config"], "model.name"),
        "created_at": row["created_at"],
        "ended_at": row["ended_at"],
        "step": max(metrics, default=0),
        "steps": recorded(row["config"], "run.steps"),
        "reward": newest.get(REWARD),
        "held_out": newest.get(HELD_OUT),
    }


def show_command(run: RunPath) -> None:
    """Show a run: its steps, evaluations, and where its calls went."""
    folder = RunFolder.existing(run, "run")
    with contextlib.closing(open_run(folder)) as opened:
        state = state_of(folder, opened.row)
        show_run(console, opened.store, opened.row, state, how_to_continue(folder))
        show_evaluations(console, opened)


def verify_command(run: RunPath) -> None:
    """Count a run's calls one by one, and compare them with its sums; the exit code is 1 if not."""
    store, found = open_store(RunFolder.existing(run, "run"))
    with contextlib.closing(store):
        verified = store.verify(found["id"])
    show_verified(console, verified)
    if verified.fault:
        sys.exit(1)
