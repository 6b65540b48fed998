"""``agentrl report``: write one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl.runs.folder import RunFolder


def report_command(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    out: Annotated[
        Path | None, Parameter(help="File to write; by default RUN/report.html.")
    ] = None,
) -> None:
    """Write charts, evaluations and examples of a run as one HTML file that needs nothing else."""
    from agentrl.ui.report import run_report

    folder = RunFolder.existing(run, "run")
    path = out or folder.root / "report.html"
    if not path.parent.is_dir():
        raise ConfigError(f"out: {str(path.parent)!r} is no folder; make it first")
    text = run_report(folder.root)
    path.write_text(text, encoding="utf-8")
    print_line(f"{path} written, {len(text) / 1e6:.1f} MB; it has messages of a few rollouts")
