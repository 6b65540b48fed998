"""A sweep in the terminal: a live table of its trials; where there is none, a line per event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl.console.output import print_line
from agentrl.sweep.record import SweepRecord, TrialRow, short_names

_STYLES = {"complete": "green", "failed": "red", "pruned": "yellow", "running": "cyan"}
_BESIDE = 8  # lines of the terminal that are not trials


class SweepDisplay:
    """Shows a sweep while it runs."""

    def __init__(self, console: Console, metric: str) -> None:
        self._console, self._metric = console, metric
        self._record: SweepRecord | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_interactive:
            self._record = None  # what follows shows it
            self._live.stop()

    def trial(self, what: str, row: TrialRow) -> None:
        if self._console.is_interactive:
            return
        said = ""
        if row.state == "running":
            said = "  ".join(f"{name}={shown_value(value)}" for name, value in row.params.items())
        elif row.state == "failed":
            said = row.reason
        elif row.value is not None:
            at = f" at step {row.step}" if row.state == "pruned" else ""
            said = f"{self._metric} {figure(row)}{at}"
        print_line(f"trial {row.number} {what}: {said}", to=self._console)

    def show(self, record: SweepRecord) -> None:
        self._record = record

    def _render(self) -> Table | str:
        if self._record is None:
            return ""
        running = [row for row in self._record.trials if row.state == "running"]
        room = max(3, self._console.height - _BESIDE - len(running))
        others = [row for row in self._record.ranked() if row.state != "running"]
        ended = f"{len(others)} of {self._record.total} trials ended"
        more = f"; the best {room} are shown" if len(others) > room else ""
        return trials_table(self._record, [*running, *others[:room]], ended + more)


def trials_table(
    record: SweepRecord, rows: Sequence[TrialRow], caption: str | None = None
) -> Table:
    """Show trials, a row for each; the best is bold."""
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    names = short_names(record)
    for name in ("trial", "state", "step", *names.values(), record.metric):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    for row in rows:
        values = [shown_value(row.params.get(name)) for name in names]
        state = f"[{_STYLES.get(row.state, '')}]{row.state}[/]"
        cells = [str(row.number), state, str(row.step), *values, figure(row)]
        table.add_row(*cells, style="bold" if row == record.best else "")
    return table


def shown_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figure(row: TrialRow) -> str:
    """Return the metric of a trial, with its standard deviation over seeds."""
    if row.value is None:
        return "–"
    return f"{row.value:.4g}" + (f" ± {row.spread:.2g}" if row.spread is not None else "")
