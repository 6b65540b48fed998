"""A sweep as a PNG: parallel coordinates, importance, contour and history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.process_privacy import open_private
from agentrl.sweep.figures import axes, best_so_far, places, surface, with_value
from agentrl.sweep.record import SweepRecord, short_names

_INK, _GRID = "#24292f", "#d8dee4"


def draw_sweep(record: SweepRecord, path: Path) -> None:
    """Draw a sweep that has complete trials."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    values = [row.value or 0.0 for row in with_value(record)]
    map_name = "viridis_r" if record.direction == "maximize" else "viridis"
    scale = ScalarMappable(Normalize(min(values), max(values)), colormaps[map_name])
    figure = Figure(figsize=(11, 7.6), dpi=84, layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    upper, lower = halves
    _parallel(upper.add_subplot(), record, scale)
    left, middle, right = lower.subplots(1, 3)
    for plot in (left, middle, right):
        plot.tick_params(labelsize=8, colors=_INK)
        plot.spines[["top", "right"]].set_visible(False)
    _importance(left, record)
    _contour(middle, record, scale)
    _history(right, record)
    upper.suptitle(f"{record.name}: {len(record.trials)} trials", color=_INK, x=0.01, ha="left")
    temporary = path.with_suffix(".tmp.png")
    temporary.unlink(missing_ok=True)
    open_private(temporary).close()
    figure.savefig(temporary, pil_kwargs={"optimize": True})
    temporary.replace(path)


def _parallel(plot: Any, record: SweepRecord, scale: Any) -> None:
    lanes = axes(record)
    low, high = scale.get_clim()
    for row in with_value(record):
        value = row.value or 0.0
        line = [*places(record, row), (value - low) / (high - low) if high > low else 0.5]
        whole = row.state == "complete"
        plot.plot(
            range(len(line)), line, color=scale.to_rgba(value), linewidth=1.8 if whole else 1,
            linestyle="-" if whole else ":", alpha=0.9 if whole else 0.6,
        )  # fmt: skip
    for at, lane in enumerate(lanes):
        plot.axvline(at, color=_INK, linewidth=0.8)
        for place, label in lane.ticks:
            plot.annotate(
                label, (at, place), textcoords="offset points", xytext=(4, -3), fontsize=8,
                color=_INK, bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1},
            )  # fmt: skip
    plot.set_xticks(range(len(lanes) + 1), [*(lane.name for lane in lanes), record.metric])
    plot.set_xlim(0, len(lanes))
    plot.set_yticks([])
    plot.spines[:].set_visible(False)
    plot.tick_params(length=0, colors=_INK)
    plot.figure.colorbar(scale, ax=plot, label=record.metric, pad=0.01)


def _importance(plot: Any, record: SweepRecord) -> None:
    plot.set_title("share of the importance", loc="left", fontsize=10, color=_INK)
    names, short = list(reversed(record.importance)), short_names(record)
    plot.barh([short[name] for name in names], [record.importance[name] for name in names])
    if not names:
        plot.text(0.5, 0.5, "too few complete trials", ha="center", transform=plot.transAxes)


def _contour(plot: Any, record: SweepRecord, scale: Any) -> None:
    found = surface(record)
    if found is None:
        plot.set_axis_off()
        return
    plot.imshow(
        found.cells, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap=scale.get_cmap(),
        norm=scale.norm, interpolation="bilinear",
    )  # fmt: skip
    for x, y, row in found.points:
        plot.plot(x, y, "o", color=scale.to_rgba(row.value), markeredgecolor="white", clip_on=False)
    plot.set_title(record.metric, loc="left", fontsize=10, color=_INK)
    for axis, lane in ((plot.xaxis, found.x), (plot.yaxis, found.y)):
        axis.set_ticks([place for place, _ in lane.ticks], [label for _, label in lane.ticks])
        axis.set_label_text(lane.name.rpartition(".")[2], fontsize=9)


def _history(plot: Any, record: SweepRecord) -> None:
    plot.set_title(f"{record.metric} by trial", loc="left", fontsize=10, color=_INK)
    for state, mark, color in (("complete", "o", "#0969da"), ("pruned", "x", "#8c959f")):
        seen = [(row.number, row.value) for row in with_value(record) if row.state == state]
        plot.plot(*zip(*seen, strict=True), mark, color=color, label=state) if seen else None
    plot.step(*zip(*best_so_far(record), strict=True), where="post", color="#bc4c00", label="best")
    plot.grid(color=_GRID, linewidth=0.6)
    plot.legend(fontsize=8, frameon=False)
