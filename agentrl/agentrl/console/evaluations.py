"""Evaluations and comparisons of runs for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from agentrl.console.output import print_block, print_line, print_sentences
from agentrl.console.report import sparkline
from agentrl.console.tables import fitted
from agentrl.history.evaluations import (
    Paired,
    by_field,
    differences,
    evaluated_tasks,
    fields,
    held_out,
    pair,
    pass_at,
    stored_outcomes,
    success,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.excerpts import excerpt
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.runs.recorded import shown
from agentrl.runs.statistics import Estimate

_CURVE = 32


def show_evaluations(console: Console, run: OpenRun) -> None:
    """Show each evaluation, the newest by the fields of its tasks, and what flipped since."""
    found = stored_outcomes(run)
    if not found:
        return
    rows = [
        {
            "evaluation": f"step {step}",
            "tasks": f"{len(known)}",
            "measure": "success" if k == 1 else f"pass@{k}",
            "95 % interval": chance,
        }
        for step, known in found.items()
        for k, chance in pass_at(known).items()
    ]
    _print(console, rows)
    first, last = next(iter(found)), next(reversed(found))
    tasks = evaluated_tasks(run)
    by_fields = [
        {
            "by field": f"{field} = {excerpt(label)}",
            "tasks": f"{len(group)}",
            f"success at step {last}": success(group),
        }
        for field in fields(tasks)
        for label, group in by_field(tasks, found[last], field).items()
    ]
    if by_fields:
        _print(console, by_fields)
    if first != last and (paired := pair(found[first], found[last])):
        print_sentences(f"step {first} to {last}: {_change(paired)}", to=console)


def show_comparison(console: Console, runs: Sequence[OpenRun]) -> None:
    """Show in what runs differ: settings, curves and held-out success."""
    names = _names(runs)
    settings = [
        {"setting": name} | dict(zip(names, map(_setting, given), strict=True))
        for name, given in differences(runs).items()
    ]
    if settings:
        _print(console, settings)
    else:
        print_line("all settings are equal", to=console)
    for name in (REWARD, HELD_OUT):
        metrics = [run.store.metrics(run.id, [name]) for run in runs]
        curves = [[row[name] for row in rows.values()] for rows in metrics]
        if any(curves):
            rows = [
                {
                    name: run_name,
                    "first": f"{curve[0]:.3g}",
                    "last": f"{curve[-1]:.3g}",
                    "best": f"{max(curve):.3g}",
                    "curve": sparkline(curve[-_CURVE:]),
                }
                for run_name, curve in zip(names, curves, strict=True)
                if curve
            ]
            _print(console, rows)
    newest = list(zip(names, held_out(runs, stored_outcomes), strict=True))
    rows = [
        {"held-out": name, "step": f"{one.step}", "tasks": f"{one.tasks}", "success": one.success}
        for name, one in newest
        if one is not None
    ]
    if rows:
        _print(console, rows)
    for name, one in newest:
        if one is not None and one.against_first is not None:
            said = f"{names[0]} to {name}: {_change(one.against_first)}"
            print_sentences(said, to=console)


def _names(runs: Sequence[OpenRun]) -> list[str]:
    """Return the runs' names; their paths where names are equal."""
    names = [run.name for run in runs]
    return names if len({*names}) == len(runs) else [shown(run.folder.root) for run in runs]


def _setting(value: Any) -> str:
    return "–" if value is None else excerpt(str(value))


def _change(paired: Paired) -> str:
    return (
        f"{100 * paired.difference:+.1f} points on {paired.tasks} tasks, "
        f"{len(paired.gained)} gained, {len(paired.lost)} lost; "
        f"p = {paired.p_value:.2g} (paired exact sign-flip test)"
    )


def _print(console: Console, rows: Sequence[Mapping[str, str | Estimate]]) -> None:
    """Print rows of equal keys, the first of which names the table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_text(row.get(name, "–")) for row in rows] for name in names}
    print_block(fitted(columns, console.width), console)
    print_line(to=console)


def _text(cell: str | Estimate) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell.rate:.1%} ({cell.low:.1%} to {cell.high:.1%})"
