"""Tables that fit the terminal: columns are left out before names and ids are cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2
_LEAST = 16
"""Columns of a terminal for the last column, if it may be cut."""
_FIGURE = re.compile(r"[+-]?[\d,.]+( ?%)?|–|")


def fitted(
    columns: Mapping[str, Sequence[str]],
    width: int,
    expendable: Sequence[str] = (),
    *,
    cut_last: bool = False,
) -> Table:
    """Lay out columns by their names.

    Args:
        width: what the console has. A pipe has room for everything.
        expendable: columns that are left out, one after the other, until the rest fits.
        cut_last: the last column may be cut to the room that the others leave.
    """
    shown = dict(columns)
    last = next(reversed(shown)) if cut_last else None
    for name in expendable:
        if _width(shown, last) <= width:
            break
        del shown[name]
    widths = {name: _widest(name, cells) for name, cells in shown.items()}
    flexible = last or next(iter(shown))  # the first goes on on further lines
    room = width - _width(shown, None) + widths[flexible]
    widths[flexible] = min(widths[flexible], max(room, _LEAST))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name, cells in shown.items():
        table.add_column(
            name,
            width=widths[name],
            no_wrap=name == last,
            overflow="ellipsis" if name == last else "fold",
            justify="right" if all(map(_FIGURE.fullmatch, cells)) else "left",
        )
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _width(columns: Mapping[str, Sequence[str]], last: str | None) -> int:
    widths = [_LEAST if name == last else _widest(name, cells) for name, cells in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def _widest(name: str, cells: Sequence[str]) -> int:
    return max(map(cell_len, (name, *cells)))
