"""Charts as plain dictionaries: ``static/charts.js`` draws the rows that ``charts.html`` lists.

A chart has an ``id`` (unique on its page: a live page draws into the same picture), a ``title``, a
``kind``, ``columns``, ``rows``, and a ``unit``: ``%`` marks fractions, which are shown times 100.
A cell is a number, a text, None, or ``{"text": ..., "href": ...}``. Without columns the figures are
elsewhere on the page. The kinds and their columns:

- ``lines``: x, then a curve in each column. Options: ``log`` (the axis of y), ``style="marked"``
  (points on the curves), ``dots`` (names of columns that are points alone), ``href`` (a page about
  one x, with ``{x}`` in place of its value).
- ``bars``: a name, then a value in each column. Option: ``horizontal``.
- ``flow`` (Sankey): from, to, amount.
- ``timeline``: lane, label, start and duration in seconds.

The columns ``NAME, low`` and ``NAME, high`` are the spread of the column ``NAME``. A script that is
loaded after ``charts.js`` may add kinds: ``agentrlCharts.kinds.NAME = (chart, theme) => an ECharts
option``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.runs.folder import strict

Chart = dict[str, Any]
Points = Mapping[Any, float | None]
"""Values by x, or by name."""


def chart(
    kind: str, key: str, title: str, columns: Iterable[str] = (),
    rows: Iterable[Sequence[Any]] = (), unit: str = "", **options: Any,
) -> Chart:  # fmt: skip
    return strict(
        {"kind": kind, "id": key, "title": title, "unit": unit, "columns": list(columns),
         "rows": list(rows), **options}
    )  # fmt: skip


def lines(
    key: str, title: str, curves: Mapping[str, Points], *, x: str = "step", **options: Any
) -> Chart:
    """Return curves by name; one without a value is left out, a missing value is a gap."""
    known = {name: one for name, one in curves.items() if any(y is not None for y in one.values())}
    places = sorted({place for points in known.values() for place in points})
    return chart("lines", key, title, [x, *known], _rows(places, known), **options)


def bars(
    key: str, title: str, series: Mapping[str, Points], *, x: str = "", **options: Any
) -> Chart:
    """Return values by name, beside each other where several series have the name."""
    names = dict.fromkeys(name for points in series.values() for name in points)
    return chart("bars", key, title, [x, *series], _rows(names, series), **options)


def with_spread(
    name: str, values: Mapping[Any, float], spread: Mapping[Any, tuple[float, float]]
) -> dict[str, Mapping[Any, float]]:
    """Return a column of values and those of their spread, where there is a value."""
    known = {x: ends for x, ends in spread.items() if x in values}
    return {
        name: values,
        f"{name}, low": {x: low for x, (low, _) in known.items()},
        f"{name}, high": {x: high for x, (_, high) in known.items()},
    }


def _rows(places: Iterable[Any], columns: Mapping[str, Points]) -> list[list[Any]]:
    return [[place, *(points.get(place) for points in columns.values())] for place in places]
