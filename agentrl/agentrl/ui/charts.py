"""Chart data as plain dictionaries: ``static/charts.js`` draws them, ``charts.html`` lists them.

A chart has an ``id`` (unique on its page: a live page draws into the same picture), a ``title``,
a ``kind``, what the kind needs, and the ``table`` of its figures. Kinds: ``lines`` (curves, spreads
and points over numbers), ``bars`` (over names, beside or on each other), ``flow`` (Sankey) and
``timeline`` (intervals of time in lanes). A script that is loaded after ``charts.js`` may add kinds
of its own: ``agentrlCharts.kinds.NAME = (chart, theme) => an ECharts option``; ``other`` makes
their data.

Units: ``%`` marks fractions, which are shown times 100; any other follows the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.runs.folder import strict

Chart = dict[str, Any]
Series = dict[str, Any]
Cell = Any
"""A number, a text, None, or ``{"text": ..., "href": ...}``."""

_MOST_POINTS = 400
"""Of a curve; longer ones are thinned."""


def curve(
    name: str,
    points: Mapping[int, float | None] | Iterable[tuple[float, float | None]],
    spread: Mapping[Any, tuple[float, float]] | None = None,
    *,
    style: str = "line",
) -> Series:
    """Return one series of ``lines``.

    Args:
        points: y by x, or pairs in order of x; None leaves a gap.
        spread: low and high by x. Drawn as a band; with ``dots`` as an error bar.
        style: ``line``, ``dashed``, ``dots`` (points alone) or ``marked`` (points on a line).
    """
    pairs = list(points.items() if isinstance(points, Mapping) else points)
    step = -(-len(pairs) // _MOST_POINTS) or 1
    kept = pairs[(len(pairs) - 1) % step :: step] if pairs else []  # the last one stays
    low_high = [list((spread or {}).get(x, ())) or None for x, _ in kept] if spread else None
    return {
        "name": name,
        "points": [list(pair) for pair in kept],
        "spread": low_high,
        "style": style,
    }


def lines(
    key: str, title: str, series: Sequence[Series], *, x: str = "step", y: str = "", unit: str = "",
    log: bool = False, href: str = "",
) -> Chart:  # fmt: skip
    """Return curves over numbers.

    Args:
        x, y: names of the axes.
        unit: of y.
        log: y has a logarithmic axis.
        href: a page about one x, with ``{x}`` where its value goes; points and rows lead there.
    """
    shown = [one for one in series if any(value is not None for _, value in one["points"])]
    return _chart(
        "lines", key, title, series=shown, x=x, y=y, unit=unit, log=log, href=href,
        table=_curves_table(shown, x, unit, href),
    )  # fmt: skip


def bars(
    key: str, title: str, names: Sequence[str], series: Sequence[Series], *, x: str = "",
    unit: str = "", stacked: bool = False, horizontal: bool = False,
    hrefs: Sequence[str | None] = (),
) -> Chart:  # fmt: skip
    """Return bars over ``names``.

    Args:
        series: each ``{"name", "values", "spread"}``: a value (or None) for each name and, where
            given, its low and high.
        x: what the names are.
        hrefs: a page about each name.
    """
    head = [x, *(one["name"] for one in series)]
    rows = []
    for at, name in enumerate(names):
        first = {"text": name, "href": hrefs[at]} if hrefs and hrefs[at] else name
        cells = [
            _with_spread(one["values"][at], (one.get("spread") or {}), at, unit) for one in series
        ]
        rows.append([first, *cells])
    return _chart(
        "bars", key, title, names=list(names), series=list(series), x=x, unit=unit, stacked=stacked,
        horizontal=horizontal, hrefs=list(hrefs), table={"head": head, "rows": rows},
    )  # fmt: skip


def flow(
    key: str, title: str, links: Sequence[tuple[str, str, float]],
    hrefs: Mapping[str, str] | None = None, unit: str = "",
) -> Chart:  # fmt: skip
    """Return a flow from names to names: ``links`` are (from, to, amount); ``hrefs`` by name."""
    hrefs = hrefs or {}
    names = list(dict.fromkeys(name for start, end, _ in links for name in (start, end)))
    nodes = [{"name": name, "href": hrefs.get(name)} for name in names]
    rows = [
        [start, {"text": end, "href": hrefs[end]} if end in hrefs else end, amount]
        for start, end, amount in links
    ]
    drawn = [{"source": a, "target": b, "value": amount} for a, b, amount in links if amount]
    return _chart(
        "flow", key, title, nodes=nodes, links=drawn, unit=unit,
        table={"head": ["from", "to", unit or "amount"], "rows": rows},
    )  # fmt: skip


def timeline(
    key: str, title: str, lanes: Sequence[str], spans: Sequence[tuple[str, float, float, str]]
) -> Chart:
    """Return intervals in lanes: ``spans`` are (lane, start, end, label), in seconds from 0."""
    rows = [[lane, label, start, end - start] for lane, start, end, label in spans]
    return _chart(
        "timeline", key, title, lanes=list(lanes), spans=[list(span) for span in spans],
        table={"head": ["phase", "", "from (s)", "seconds"], "rows": rows},
    )  # fmt: skip


def other(kind: str, key: str, title: str, **data: Any) -> Chart:
    """Return a chart of a kind that another script draws; ``data`` is what it reads.

    It has no table of its own: its figures are elsewhere on the page.
    """
    return _chart(kind, key, title, table=None, **data)


def figure_text(value: float | None, unit: str) -> str:
    """Return a number with its unit, as tables and tooltips show it."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{text} {unit}".rstrip()


def _chart(kind: str, key: str, title: str, *, table: Any, **data: Any) -> Chart:
    drawn = strict({"kind": kind, "title": title, **data})
    return {"id": key, "title": title, "kind": kind, "unit": data.get("unit", ""), "drawn": drawn,
            "table": table}  # fmt: skip


def _with_spread(value: float | None, spread: Any, at: Any, unit: str) -> str:
    try:
        low, high = spread[at]
    except (KeyError, IndexError, TypeError):
        return figure_text(value, unit)
    return f"{figure_text(value, unit)} ({figure_text(low, unit)} to {figure_text(high, unit)})"


def _curves_table(series: Sequence[Series], x: str, unit: str, href: str) -> dict[str, Any]:
    columns = [
        {
            point[0]: _with_spread(point[1], one["spread"], at, unit)
            for at, point in enumerate(one["points"])
        }
        for one in series
    ]
    places = sorted({place for column in columns for place in column})
    rows = [
        [
            {"text": f"{place:,}", "href": href.replace("{x}", str(place))}
            if href
            else f"{place:,}",
            *(column.get(place) for column in columns),
        ]
        for place in places
    ]
    return {"head": [x, *(one["name"] for one in series)], "rows": rows}
