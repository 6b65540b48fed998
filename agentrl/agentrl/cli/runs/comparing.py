"""``agentrl runs compare``: settings, curves and held-out success of several runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.console.evaluations import show_comparison
from agentrl.console.output import console
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder


def compare_command(
    *runs: Annotated[Path, Parameter(help="Run folders, for instance runs/a runs/b.")],
) -> None:
    """Compare runs: where settings differ, curves, and held-out success on the same tasks."""
    if len({run.absolute() for run in runs}) < 2:
        raise ConfigError("runs: give at least two run folders")
    with contextlib.ExitStack() as stack:
        opened = [open_run(RunFolder.existing(run, "runs")) for run in runs]
        for run in opened:
            stack.callback(run.close)
        show_comparison(console, opened)
