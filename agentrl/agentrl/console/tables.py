"""Tables and facts for the terminal: columns are left out before names and ids are cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.console.output import print_block, print_line
from agentrl.runs.excerpts import excerpt
from agentrl.runs.statistics import Estimate

NAME_WIDTH = 17
"""Columns of a terminal for the names of facts, at least."""
_GAP = 2
_LEAST = 16
"""Columns of a terminal for a column that may be cut."""
_FIGURE = re.compile(r"[+-]?[\d,.]+( ?%)?|–")
_BARS = "▁▂▃▄▅▆▇█"


def print_rows(
    to: Console,
    rows: Sequence[Mapping[str, Any]],
    columns: str = "",
    *,
    expendable: str = "",
    cut: str = "",
    apart: bool = False,
) -> None:
    """Print rows as a table within the terminal; a pipe has room for everything.

    Args:
        columns: names separated by spaces, with the format of the values where one is needed:
            ``id reward:+.3f``; by default those of all rows. If need be, the first column goes on
            on further lines.
        expendable: columns that are left out if they are empty, and in this order until the rest
            fits.
        cut: a column that is cut to the room that the others leave.
        apart: leave a line empty above the table.
    """
    if not rows:
        return
    named = columns.split() or dict.fromkeys(name for row in rows for name in row)
    forms = {name: form for name, _, form in (one.partition(":") for one in named)}
    shown = {name: [_cell(row.get(name), form) for row in rows] for name, form in forms.items()}
    for name in (*expendable.split(), cut):
        if {*shown.get(name, ())} == {"–"}:
            del shown[name]

    def width_of(name: str) -> int:
        widest = max(map(cell_len, (name, *shown[name])))
        return min(widest, _LEAST) if name == cut else widest

    for name in expendable.split():
        if sum(map(width_of, shown)) + _GAP * (len(shown) - 1) <= to.width:
            break
        shown.pop(name, None)
    flexible = cut if cut in shown else next(iter(shown))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name, cells in shown.items():
        figures = all(map(_FIGURE.fullmatch, cells))
        table.add_column(name, no_wrap=name != flexible, justify="right" if figures else "left")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*(_text(cell, name == cut) for name, cell in zip(shown, row, strict=True)))
    if apart:
        print_line(to=to)
    print_block(table, to)


def _text(cell: str, cut: bool) -> Text:
    return Text(cell, no_wrap=True, overflow="ellipsis") if cut else Text(cell, overflow="fold")


def _cell(value: Any, form: str) -> str:
    match value:
        case None | "":
            return "–"
        case Estimate():
            return f"{value.rate:.1%} ({value.low:.1%} to {value.high:.1%})"
        case _:
            return format(value, form) if form else excerpt(str(value))


def facts(rows: Iterable[tuple[str, Any]]) -> Table:
    """Lay out named facts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def sparkline(values: Sequence[float]) -> str:
    """Draw values as one line of bars, scaled to their own range."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )
