"""What a run's folder and store say of it together: its store, its state, how to continue it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import BaseModel

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import as_recorded, store_url
from agentrl.config.setting_names import recorded
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json, Policies
from agentrl_tracer.store import Store
from agentrl_tracer.store.faults import PATIENCE_S

_SILENT_S = 60.0
"""Without a heartbeat, after which a process on another machine counts as gone."""


def shown(path: Path) -> str:
    """Return a path as users read and copy it: relative, if it is below the shell's directory."""
    return str(path.relative_to(SHELL_IN) if path.is_relative_to(SHELL_IN) else path)


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path(os.sep)


SHELL_IN = _working_directory()  # ``--resume`` goes back to where the run was started


def open_store(
    folder: RunFolder, patience_s: float = PATIENCE_S, *, read_only: bool = False
) -> tuple[Store, Json]:
    """Open the store of a run; return the run's row, too.

    Args:
        patience_s, read_only: as for ``Store``.

    Raises:
        ConfigError: the store does not hold the run.
        MissingSecretError: its password is not in the environment.
    """
    config, run_id = folder.read_config(), folder.run_id.read_text().strip()
    shared: str | None = recorded(config, "run.store", config.get("store"))  # once flat
    url = store_url(shared) if shared else str(folder.store)
    if "://" not in url:
        start = folder.started_in.read_text() if folder.started_in.is_file() else ""
        url = str(Path(start, url) if Path(start).is_dir() else Path(url))
    if "://" in url or Path(url).is_file():  # else it would be made
        store = Store(url, patience_s=patience_s, read_only=read_only)
        if row := store.run(run_id):
            return store, row
        store.close()
    raise ConfigError(
        f"run.store: the store {shared or folder.store} is not there, or does not hold the run "
        f"{run_id} of {folder.root}; bring it back, with the files -wal and -shm beside it"
    )


def register(
    folder: RunFolder, store: Store, kind: str, config: BaseModel, policies: Policies
) -> tuple[str, bool]:
    """Write a run's settings to its folder and its store.

    Returns:
        Its id, new or as the folder has it, and whether it is resumed.
    """
    settings = as_recorded(config.model_dump(mode="json"))
    if resumed := folder.config.exists():
        run_id = folder.run_id.read_text().strip()
        store.resume_run(run_id, settings, policies)
    else:
        run_id = store.create_run(folder.name, kind, settings, policies)
        folder.write(folder.started_in, os.getcwd())
        folder.write(folder.run_id, run_id)
    # Last: only a folder with a configuration can be resumed.
    folder.write_json(folder.config, settings)
    return run_id, resumed


def state_of(folder: RunFolder, run: Json) -> str:
    """Return a run's state: interrupted, too, if its process is gone and could not say so, and
    pruned if a sweep interrupted it."""
    state = run["state"]
    if state == "running":
        in_use, heard = folder.is_in_use(), run["heartbeat_at"]
        silent = in_use is None and heard is not None and time.time() - heard > _SILENT_S
        state = "interrupted" if in_use is False or silent else "running"
    return "pruned" if state == "interrupted" and folder.pruned.exists() else state


OFFLINE = ("sft", "prefer", "reward-model")
"""Kinds of runs that train on examples: no rollouts are made."""
CONTINUED = ("train", *OFFLINE)
"""Kinds of runs that the command of the same name continues."""


def how_to_continue(folder: RunFolder, kind: str = "train") -> str:
    """Say which command continues a run of one of the kinds ``CONTINUED``; empty if nothing was
    begun."""
    command = f"agentrl {kind} --resume {shown(folder.root)}"
    return f"continue it with:  {command}" if folder.exists() else ""
