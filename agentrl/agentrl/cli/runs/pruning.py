"""``agentrl runs prune``: delete what ended runs no longer need."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.cli.runs.opening import RunsPath, each_run
from agentrl.config.errors import ConfigError
from agentrl.console.output import console, print_block, print_line
from agentrl.console.tables import fitted
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import state_of
from agentrl_tracer.store import StoreError


def prune_command(
    runs: RunsPath = Path("runs"),
    *,
    yes: Annotated[bool, Parameter(help="Do not ask.")] = False,
) -> None:
    """Delete what ended runs no longer need, after asking.

    Of every run that has ended: logs, the trainer's token records, and the index of the pages,
    which is made again. Of finished runs also checkpoints, without which they cannot be resumed,
    and adapters but the newest and those that hold a file `keep`. Stores, metrics, `adapter` and
    `adapter-best` stay.
    """
    faults: list[str] = []
    found: list[tuple[str, str, list[Path]]] = []
    for folder, _, row in each_run(runs, faults):
        state = state_of(folder, row)
        if state != "running" and not folder.is_in_use():
            kinds = _what_may_go(folder, finished=state == "finished")
            found += [(folder.name, kind, paths) for kind, paths in kinds if paths]
    sizes = [sum(map(_size, paths)) for _, _, paths in found]
    if not found:
        print_line(f"nothing to prune in {runs}")
    else:
        columns = {
            "run": [name for name, _, _ in found],
            "what": [kind for _, kind, _ in found],
            "number": [f"{len(paths)}" for _, _, paths in found],
            "MB": [f"{size / 1e6:,.1f}" for size in sizes],
        }
        print_block(fitted(columns, console.width))
        print_line(f"{sum(sizes) / 1e6:,.1f} MB in all")
        if _agreed(yes):
            for path in (path for _, _, paths in found for path in paths):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            print_line("deleted")
    if faults:
        raise StoreError("\n".join(faults))


def _what_may_go(folder: RunFolder, *, finished: bool) -> Iterator[tuple[str, list[Path]]]:
    yield "logs", sorted(folder.logs.glob("*"))
    yield "token records", sorted(folder.tokens.glob("*"))
    yield "index", sorted(folder.root.glob("view.db*"))
    if finished:
        yield "checkpoints", sorted(folder.checkpoints.glob("*"))
        versions = [sorted(one.glob("v[0-9]*")) for one in folder.adapters.glob("*")]
        older = [path for each in versions for path in each[:-1]]
        yield "adapters", [path for path in older if not (path / "keep").exists()]


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def _agreed(yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("yes: nothing was deleted; say --yes, because there is no one to ask")
    return input("Delete these? [y/N] ").strip().lower() in ("y", "yes")
