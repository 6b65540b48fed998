"""What a sweep writes at its end: ``sweep.png``, and ``sweep.html``, which needs no server."""

from __future__ import annotations

from pathlib import Path

from agentrl.runs.folder import RunFolder
from agentrl.sweep.picture import draw_sweep
from agentrl.sweep.record import SweepRecord
from agentrl.ui.sweep_charts import sweep_charts
from agentrl.ui.views import render_alone

_STYLES = ("app.css", "charts.css", "sweeps.css")
_SCRIPTS = ("echarts.min.js", "charts.js", "sweeps.js")


def write_pictures(folder: RunFolder, record: SweepRecord) -> list[Path]:
    """Write both files into the sweep's folder; return their paths."""
    picture, page = folder.root / "sweep.png", folder.root / "sweep.html"
    draw_sweep(record, picture)
    text = render_alone(
        "sweep_report.html", _STYLES, _SCRIPTS, title=record.name, record=record,
        charts=sweep_charts(record), links=False,
    )  # fmt: skip
    folder.write(page, text)
    return [picture, page]
