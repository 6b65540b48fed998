"""What a sweep writes at its end: ``sweep.png``, and ``sweep.html``, which needs no server."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from agentrl.runs.folder import RunFolder
from agentrl.sweep.study import SweepResults
from agentrl.ui.sweep_charts import sweep_charts
from agentrl.ui.views import render_alone

_STYLES = ("app.css", "charts.css", "sweeps.css")
_SCRIPTS = ("echarts.min.js", "charts.js", "sweeps.js")


def write_pictures(folder: RunFolder, found: SweepResults) -> list[Path]:
    """Write both files of a sweep that has complete trials; return their paths."""
    picture, page = folder.root / "sweep.png", folder.root / "sweep.html"
    charts = sweep_charts(found)
    folder.write(picture, _png(f"{found.name}: {len(found.trials)} trials", charts))
    text = render_alone(
        "sweep_report.html", _STYLES, _SCRIPTS, title=found.name, found=found, charts=charts,
        links=False,
    )  # fmt: skip
    folder.write(page, text)
    return [picture, page]


def _png(title: str, charts: list[dict[str, Any]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    draw = {"parallel": _parallel, "bars": _bars, "contour": _contour, "lines": _lines}
    upper, *lower = [chart["kind"] for chart in charts]
    figure = Figure(figsize=(11, 7.6), dpi=84, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    plots: Any = figure.subplot_mosaic([[upper] * len(lower), lower])
    for chart in charts:
        plot = plots[chart["kind"]]
        plot.set_title(chart["title"], fontsize=9)
        draw[chart["kind"]](plot, chart)
    drawn = io.BytesIO()
    figure.savefig(drawn, pil_kwargs={"optimize": True})
    return drawn.getvalue()


def _parallel(plot: Any, chart: Any) -> None:
    color = _color(chart, [line[-1] for line in chart["lines"]])
    for line, state in zip(chart["lines"], chart["states"], strict=True):
        *places, value = line
        style = "-" if state == "complete" else ":"
        plot.plot([*places, color.norm(value)], style, color=color.to_rgba(value))
    for at, axis in enumerate(chart["axes"]):
        plot.axvline(at, color="black", linewidth=0.8)
        for place, label in axis["ticks"]:
            plot.text(at, place, label, bbox={"fc": "white", "ec": "none", "pad": 1})
    names = [*(axis["name"] for axis in chart["axes"]), chart["metric"]]
    plot.set(xticks=range(len(names)), xticklabels=names, xlim=(0, len(names) - 1), yticks=[])
    plot.spines[:].set_visible(False)
    plot.figure.colorbar(color, ax=plot, label=chart["metric"], pad=0.01)


def _bars(plot: Any, chart: Any) -> None:
    plot.barh(*zip(*chart["rows"], strict=True))
    plot.invert_yaxis()


def _contour(plot: Any, chart: Any) -> None:
    xs, ys, values, _ = zip(*chart["points"], strict=True)
    color = _color(chart, values)
    how = {"cmap": color.get_cmap(), "norm": color.norm}
    plot.imshow(chart["cells"], origin="lower", extent=(0, 1, 0, 1), aspect="auto", **how)
    plot.scatter(xs, ys, c=values, ec="white", clip_on=False, **how)
    for axis, about in ((plot.xaxis, chart["x"]), (plot.yaxis, chart["y"])):
        axis.set_ticks(*zip(*about["ticks"], strict=True))
        axis.set_label_text(about["name"])


def _lines(plot: Any, chart: Any) -> None:
    for at, name in enumerate(chart["columns"][1:], 1):
        points = [(row[0], row[at]) for row in chart["rows"] if row[at] is not None]
        style = "o" if name in chart["dots"] else "-"
        plot.plot(*zip(*points, strict=True), style, label=name)
    plot.legend()


def _color(chart: Any, values: Any) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    name = "viridis_r" if chart["maximize"] else "viridis"
    return ScalarMappable(Normalize(min(values), max(values)), name)
