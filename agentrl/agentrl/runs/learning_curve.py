"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.process_privacy import open_private
from agentrl.runs.metric_names import HELD_OUT, REWARD

_INK, _GRID = "#24292f", "#d8dee4"
_REWARD_COLOR, _HELD_OUT_COLOR = "#0969da", "#bc4c00"


Curve = tuple[str, str]
"""The name of a metric, and what its axis says."""


def draw_learning_curve(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    path: Path,
    trained: Curve = (REWARD, "mean reward of training rollouts"),
    held_out: Curve = (HELD_OUT, "held-out accuracy"),
) -> None:
    """Draw how training went, and what held-out data say, over steps as a PNG."""
    # The object interface: pyplot would pick a backend for the process and hold every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    reward, measured = (
        [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        for name, _ in (trained, held_out)
    )
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    left.set_title(title, loc="left", color=_INK, fontsize=12)
    left.set_xlabel("optimizer step", color=_INK)
    left.set_ylabel(trained[1], color=_REWARD_COLOR)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(color=_GRID, linewidth=0.6)
    left.spines[["top"]].set_visible(False)
    if reward:
        left.plot(*zip(*reward, strict=True), color=_REWARD_COLOR, linewidth=1.8, zorder=3)
    if measured:
        right = left.twinx()
        right.set_ylabel(held_out[1], color=_HELD_OUT_COLOR)
        share = held_out[0] == HELD_OUT
        if share:
            right.set_ylim(-0.04, 1.1)
        right.spines[["top"]].set_visible(False)
        right.plot(*zip(*measured, strict=True), "o--", color=_HELD_OUT_COLOR, markersize=4.5)
        last = format(measured[-1][1], ".0%" if share else ".3g")
        right.annotate(
            last, measured[-1], textcoords="offset points", xytext=(0, 6),
            ha="right", color=_HELD_OUT_COLOR,
        )  # fmt: skip
    temporary = path.with_suffix(".tmp.png")
    temporary.unlink(missing_ok=True)
    open_private(temporary).close()
    figure.savefig(temporary)
    temporary.replace(path)
