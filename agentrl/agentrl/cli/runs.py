"""``agentrl runs``: look at runs, compare, export and reward again what they recorded, prune their
folders.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import store_url
from agentrl.console import runs as screen
from agentrl.console.output import (
    console,
    print_block,
    print_json,
    print_line,
    print_sentences,
    stderr,
)
from agentrl.console.tables import print_rows
from agentrl.console.trace_tree import rollout_trace
from agentrl.history import export as exports
from agentrl.history.atif import atif_records
from agentrl.history.atif_import import import_trajectories
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.run_list import RunList
from agentrl.history.sources import OpenRun, Sources, open_run
from agentrl.runs.folder import RunFolder, versions_of
from agentrl.runs.recorded import CONTINUED, how_to_continue, shown
from agentrl_tracer.store import Store, StoreError

_OPTION = Parameter(show_default=False)
RunPath = Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")]
RunsPath = Annotated[Path, Parameter(help="Folder of run folders.")]
Where = Annotated[
    str, _OPTION, Parameter(help="Which rollouts, such as 'reward < 0 and step > 10'.")
]
Search = Annotated[str, _OPTION, Parameter(help="Words that the messages have, all of them.")]
Sort = Annotated[
    str, _OPTION, Parameter(help="A column; - in front: largest first.", allow_leading_hyphen=True)
]
AsJson = Annotated[bool, _OPTION, Parameter(name="--json", help="One JSON object a line.")]
Limit = Annotated[int, Parameter(help="How many at most; 0 is all.", validator=Number(gte=0))]
Served = Annotated[bool, _OPTION, Parameter(help="What `agentrl serve` recorded.")]
ServedStore = Annotated[str, Parameter(help="Where it recorded: `run.store` of the server.")]

T = TypeVar("T")
runs_app = App(name="runs", help="Look at earlier runs.")


# ---- look


@runs_app.command(name="list")
def list_command(runs: RunsPath = Path("runs"), *, json: AsJson = False) -> None:
    """List the runs in a folder."""
    with closing(Sources(runs)) as sources:
        found, faults = RunList(sources).all()
    closed = [one for one in runs.glob("*") if one.is_dir() and not os.access(one, os.R_OK)]
    faults += [f"Permission denied: '{folder}'" for folder in closed]
    found = sorted(found, key=lambda run: run.name)
    _print(found, json, screen.show_runs, "" if faults else f"no runs in {runs}")
    for run in () if json else found:
        if run.state == "interrupted" and run.kind in CONTINUED:
            command = how_to_continue(RunFolder(runs / run.name), run.kind)
            print_line(f"{run.name} was interrupted; {command}")
    _raise(faults)


@runs_app.command(name="show")
def show_command(run: RunPath) -> None:
    """Show a run: its steps, evaluations, and where its calls went."""
    with _opened(run) as opened:
        screen.show_run(console, opened)


@runs_app.command(name="rollouts")
def rollouts_command(
    run: RunPath,
    *,
    where: Where = "",
    search: Search = "",
    sort: Sort = "",
    limit: Limit = 50,
    json: AsJson = False,
) -> None:
    """List the rollouts of a run that match."""
    query = Query(where, search, sort, limit or -1)
    with _indexed(run, query) as opened:
        found = find_rollouts(opened.index, query)
    _print(found.rows, json, screen.show_rollouts)
    if not json and (len(found.rows) < found.total or not found.rows):
        more = "; --limit 0 shows all" if found.rows else ""
        print_line(f"{len(found.rows)} of {found.total:,} rollouts{more}")


@runs_app.command(name="rollout")
def rollout_command(
    rollout: Annotated[str, Parameter(help="Id of a rollout, as `runs rollouts` shows it.")],
    *,
    runs: RunsPath = Path("runs"),
) -> None:
    """Show the trace of a rollout of any run: attempts, spans, calls, rewards and outputs."""
    with closing(Sources(runs)) as sources:
        known, faults = sources.all()
        for run in known:
            for found in run.store.rollouts(run.id, ids=[rollout]):
                print_block(rollout_trace(run.store, found))
                return
    _raise([f"no other run in {runs} has it:", *faults] if faults else [])
    raise ConfigError(f"rollout: {rollout!r} is no rollout of a run in {runs}; --runs names others")


@runs_app.command(name="compare")
def compare_command(
    *runs: Annotated[Path, Parameter(help="Run folders, for instance runs/a runs/b.")],
) -> None:
    """Compare runs: where settings differ, curves, and held-out success on the same tasks."""
    if len({run.absolute() for run in runs}) < 2:
        raise ConfigError("runs: give at least two run folders")
    with ExitStack() as stack:
        screen.show_comparison(console, [stack.enter_context(_opened(run)) for run in runs])


@runs_app.command(name="calls")
def calls_command(
    run: RunPath | None = None,
    *,
    served: Served = False,
    store: ServedStore = "runs/serve.db",
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """List the newest calls of a run, or those that `agentrl serve` answered."""
    with _run_or_served(run, served, store) as (opened, run_id):
        calls = opened.newest_calls(run_id, limit or None)
    _print(calls, json, screen.show_calls, "no calls yet")


@runs_app.command(name="verify")
def verify_command(run: RunPath) -> None:
    """Count a run's calls one by one, and compare them with its sums; the exit code is 1 if not."""
    with _opened(run) as opened:
        verified = opened.store.verify(opened.id)
    screen.show_verified(console, verified)
    if verified.fault:
        sys.exit(1)


def _print(
    found: Sequence[T], as_json: bool, show: Callable[[Console, Sequence[T]], None], none: str = ""
) -> None:
    """Print what was found as JSON lines or as ``show`` does; if it is nothing, say ``none``."""
    if as_json:
        for one in found:
            print_json(one)
    elif found:
        show(console, found)
    elif none:
        print_line(none)


# ---- write for other programs


@runs_app.command(name="export")
def export_command(
    run: RunPath,
    *,
    format: Annotated[
        Literal["jsonl", "parquet", "sft", "pairs", "rows", "atif"],
        Parameter(
            help="jsonl and parquet: rollouts with their calls; sft: OpenAI chat messages of the "
            "successful ones; pairs: best against worst of each group; rows: tokens, mask and "
            "log-probs to train on; atif: Harbor's trajectories, with token ids and log-probs."
        ),
    ] = "jsonl",
    where: Where = "",
    output: Annotated[Path | None, Parameter(help="File; by default the output.")] = None,
) -> None:
    """Write rollouts as JSON lines, Parquet, chats, preference pairs, rows or trajectories."""
    kinds = {
        "sft": exports.chat_records, "pairs": exports.pair_records, "rows": exports.row_records,
        "atif": atif_records,
    }  # fmt: skip
    table = exports.check_parquet(output) if format == "parquet" else None
    if output and not output.parent.is_dir():
        raise ConfigError(f"output: there is no folder {output.parent}")
    with _indexed(run, Query(where)) as opened:
        records = kinds.get(format, exports.rollout_records)(opened, where)
        records = chain([*islice(records, 1)], records)  # what can fail comes before the file opens
        if table:
            written = exports.write_parquet(records, table)
        else:
            written = 0
            file = output.open("w", encoding="utf-8") if output else nullcontext(sys.stdout)
            with file as lines, redirect_stdout(lines):
                for record in records:
                    print_json(record)
                    written += 1
    if output is not None or not written:
        print_line(f"{written:,} records" + (f" in {output}" if output else ""), to=stderr)


@runs_app.command(name="import")
def import_command(
    *files: Annotated[
        Path, Parameter(help="Trajectories: .json, .jsonl, or a folder of Harbor's trials.")
    ],
    runs: RunsPath = Path("runs"),
    name: Annotated[str | None, Parameter(help="Of the new run; by default the time.")] = None,
) -> None:
    """Make a run of ATIF trajectories, to be looked at, exported and trained on."""
    if not files:
        raise ConfigError("files: give at least one file or folder")
    folder, count = import_trajectories(files, runs, name)
    print_line(f"{count:,} rollouts in {shown(folder)}")


@runs_app.command(name="feedback")
def feedback_command(
    run: RunPath | None = None, *, served: Served = False, store: ServedStore = "runs/serve.db"
) -> None:
    """Write the feedback of people on a run, or on served calls, as JSON lines."""
    with _run_or_served(run, served, store) as (opened, run_id):
        for one in opened.feedback(run_id):
            print_json(one)


# ---- reward again


@runs_app.command(name="rescore")
def rescore_command(
    run: RunPath,
    *,
    rewards: Annotated[
        list[str],
        Parameter(help="Functions: module:function, file.py:function or model:RUN; repeatable."),
    ],
    where: Where = "",
    replace: Annotated[
        bool, _OPTION, Parameter(help="Only these count; other rewards are kept and set aside.")
    ] = False,
) -> None:
    """Reward recorded rollouts with functions, beside or in place of the rewards that they have.

    A function replaces what it gave the same rollouts before; where it gives nothing or fails, that
    stays. Without --replace the sum of all rewards counts, those that an earlier --replace has set
    aside included.
    """
    from agentrl.scoring.functions import load_functions
    from agentrl.scoring.rescore import rescore

    functions = load_functions(rewards)
    with _indexed(run, Query(where)) as opened, Progress(console=stderr, transient=True) as bars:
        bar = bars.add_task("groups", total=None)
        done = rescore(
            opened, functions, where, print_sentences,
            lambda at, total: bars.update(bar, completed=at, total=total), alone=replace,
        )  # fmt: skip
    screen.show_rescored(console, done, alone=replace)


# ---- prune


@runs_app.command(name="prune")
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
    with closing(Sources(runs)) as sources:
        known, faults = sources.all()
        found = [(run.name, *part) for run in known for part in _what_may_go(run)]
    rows = [
        {"run": name, "what": kind, "number": len(paths), "MB": sum(map(_size, paths)) / 1e6}
        for name, kind, paths in found
    ]
    if rows:
        print_rows(console, rows, "run what number MB:,.1f")
        print_line(f"{sum(row['MB'] for row in rows):,.1f} MB in all")
    else:
        print_line(f"nothing to prune in {runs}")
    if rows and (yes or _agreed()):
        for path in (path for _, _, paths in found for path in paths):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        print_line("deleted")
    _raise(faults)


def _what_may_go(run: OpenRun) -> Iterator[tuple[str, list[Path]]]:
    folder, state = run.folder, run.current()["state"]
    if state == "running" or folder.is_in_use():
        return
    kinds = {"logs": folder.logs.glob("*"), "token records": folder.tokens.glob("*"),
             "index": folder.root.glob("view.db*")}  # fmt: skip
    if state == "finished":
        older = [path for one in folder.adapters.glob("*") for _, path in versions_of(one)[:-1]]
        kinds["checkpoints"] = folder.checkpoints.glob("*")
        kinds["adapters"] = (path for path in older if not (path / "keep").exists())
    for kind, found in kinds.items():
        if paths := sorted(found):
            yield kind, paths


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("yes: nothing was deleted; say --yes, because there is no one to ask")
    return input("Delete these? [y/N] ").strip().lower() in ("y", "yes")


# ---- open


@contextmanager
def _opened(path: Path) -> Iterator[OpenRun]:
    with closing(open_run(RunFolder.existing(path, "run"))) as run:
        yield run


@contextmanager
def _indexed(path: Path, query: Query) -> Iterator[OpenRun]:
    """Open a run with its index brought up to date: of many new rollouts it takes minutes.

    Raises:
        ConfigError: the query is wrong; says so before.
    """
    with _opened(path) as run:
        find_rollouts(run.index, replace(query, limit=0))
        with stderr.status("reading new rollouts"):  # shows nothing in a pipe
            while run.fill():
                pass
        yield run


@contextmanager
def _run_or_served(
    run: Path | None, served: bool, store: str
) -> Iterator[tuple[Store, str | None]]:
    """Lend the store of a run with the run's id, or the one of `agentrl serve` without."""
    if served == (run is not None):
        raise ConfigError("run: give a run folder, or --served for what `agentrl serve` recorded")
    if run is not None:
        with _opened(run) as opened:
            yield opened.store, opened.id
    elif "://" in store or Path(store).is_file():  # else it would be made
        with closing(Store(store_url(store))) as found:
            yield found, None
    else:
        raise ConfigError(f"store: {store} is not there; `agentrl serve` makes it")


def _raise(faults: Sequence[str]) -> None:
    """Say what is wrong with runs, after the others were shown."""
    if faults:
        raise StoreError("\n".join(faults))
