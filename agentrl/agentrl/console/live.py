"""What a run looks like in the terminal: a live panel, or a line per step where there is none."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from agentrl.runs.metric_names import DIFFERENCE, REWARD
from agentrl_tracer.schemas import Accounting

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


class TrainDisplay:
    """Shows a training run. On a terminal it is live; elsewhere every step prints one line."""

    def __init__(self, console: Console, title: str, *, since: float | None = None) -> None:
        """``since``: when the run began, by ``time.perf_counter``; by default now."""
        self._console = console
        self._title = title
        self._steps = 0
        self._step = 0
        self._first = 0
        self._phase = "starting"
        self._phase_progress: tuple[int, int] | None = None
        self._ahead: Callable[[], tuple[int, int]] | None = None
        self._ahead_seen = (0.0, "")  # when it was asked last, and the answer
        self._row: Mapping[str, Any] = {}
        self._rewards: list[float] = []
        self._held_out: list[float] = []
        self._accounting: Accounting | None = None
        self._notes: deque[str] = deque(maxlen=4)
        self._started = time.perf_counter() if since is None else since
        self._training_since: float | None = None
        self._progress = Progress(
            TextColumn("step [b]{task.completed}[/]/{task.total}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[eta]}"),
            expand=True,
        )
        self._bar = self._progress.add_task("steps", total=None, eta="")
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=8, transient=False
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._phase, self._phase_progress = ("stopped" if kind else "finished"), None
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, steps: int, done: int) -> None:
        """How far the run goes, and how much of it is done already."""
        self._steps, self._step, self._first = steps, done, done
        self._progress.update(self._bar, total=steps, completed=done)

    def phase(
        self,
        name: str,
        done: int | None = None,
        total: int | None = None,
        *,
        ahead: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """What is going on now, and how far it is.

        ``ahead`` tells of the rollouts that run beside it: how many are finished, of how many.
        """
        self._phase = name
        self._ahead, self._ahead_seen = ahead, (0.0, "")
        self._phase_progress = None if done is None or total is None else (done, total)
        if name == "rollouts" and self._training_since is None:
            self._training_since = time.monotonic()

    def step(self, row: Mapping[str, Any], accounting: Accounting) -> None:
        """A step is complete."""
        self._row, self._accounting = row, accounting
        self._step = int(row["step"])
        self._rewards.append(float(row[REWARD]))  # NaN: nothing was rewarded
        self._progress.update(self._bar, completed=self._step, eta=f"ETA {self._eta()}")
        if not self._console.is_terminal:
            skipped = sum(accounting.skipped.values())
            pending = f" + {accounting.pending} pending" if accounting.pending else ""
            self._console.print(
                f"step {self._step:>3}/{self._steps}  reward {_signed(row[REWARD])}  "
                f"held-out {self._accuracy()}  {row['tokens_per_second']:.0f} tok/s  "
                f"calls {accounting.recorded} = {accounting.trained} trained + {skipped} skipped"
                f"{pending}"
                f"{'' if accounting.adds_up else '  DOES NOT ADD UP'}  "
                f"Δlogprob {row[DIFFERENCE]:.1e}{self._asynchronous('  ')}  ETA {self._eta()}",
                soft_wrap=True,
                highlight=False,
            )

    def evaluated(self, step: int, accuracy: float) -> None:
        self._held_out.append(accuracy)
        if not self._console.is_terminal:
            self._console.print(f"step {step:>3}/{self._steps}  held-out accuracy {accuracy:.1%}")

    def note(self, message: str) -> None:
        """Something that went wrong and was dealt with."""
        self._notes.append(message)
        if not self._console.is_terminal:
            self._console.print(f"note: {message}", soft_wrap=True, markup=False)

    def _asynchronous(self, before: str = "") -> str:
        """How stale what was learned from is, and how much came for free; empty if synchronous."""
        row = self._row
        parts: list[str] = []
        if row.get("groups/resampled"):
            parts.append(f"{row['groups/resampled']} groups replaced")
        if row.get("staleness/max") or row.get("groups/ahead"):
            parts.append(
                f"staleness {row['staleness/mean']:.1f} (max {row['staleness/max']})  "
                f"overlapped {row['seconds/overlapped']:.1f} s"
            )
        return before + "  ".join(parts) if parts else ""

    def _rollouts_ahead(self) -> str:
        """What runs beside the phase; asked for once a second at most."""
        if self._ahead is None:
            return ""
        if time.monotonic() - self._ahead_seen[0] > 1.0:
            done, total = self._ahead()
            text = f"   rollouts of the next steps {done}/{total}"
            self._ahead_seen = (time.monotonic(), text)
        return self._ahead_seen[1]

    def _accuracy(self) -> str:
        return f"{self._held_out[-1]:.1%}" if self._held_out else "–"

    def _eta(self) -> str:
        made = self._step - self._first
        if self._training_since is None or made <= 0:
            return "–"
        per_step = (time.monotonic() - self._training_since) / made
        return _duration(per_step * (self._steps - self._step))

    def _render(self) -> Panel:
        phase = Text(self._phase, style="bold cyan")
        if self._phase_progress:
            phase.append(f" {self._phase_progress[0]}/{self._phase_progress[1]}", style="cyan")
        phase.append(self._rollouts_ahead(), style="cyan")
        phase.append(f"   {_duration(time.perf_counter() - self._started)} elapsed", style="dim")
        parts: list[Any] = [self._progress, phase, self._table()]
        parts += [Text(f"! {note}", style="yellow", overflow="ellipsis") for note in self._notes]
        return Panel(
            Group(*parts), title=f"[b]{self._title}[/]", title_align="left", border_style="blue"
        )

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        reward = Text("–")
        if self._rewards:
            reward = Text(f"{_signed(self._rewards[-1])}  ", style="bold green")
            reward.append(sparkline(self._rewards[-_CURVE_WIDTH:]), style="green")
        table.add_row("mean reward", reward)
        held_out = Text(self._accuracy(), style="bold magenta")
        if len(self._held_out) > 1:
            held_out.append("  " + sparkline(self._held_out[-_CURVE_WIDTH:]), style="magenta")
        table.add_row("held-out accuracy", held_out)
        if self._row:
            row = self._row
            table.add_row("sampled", f"{row['tokens_per_second']:,.0f} tokens/s")
            table.add_row(
                "sampler vs trainer",
                f"largest log-prob difference {row[DIFFERENCE]:.1e}",
            )
        if beside := self._asynchronous():
            table.add_row("rollouts", beside)
        if self._accounting:
            table.add_row("calls", _calls(self._accounting))
        return table


def _calls(a: Accounting) -> Text:
    text = Text(f"{a.proxied} proxied = {a.recorded} recorded = {a.trained} trained")
    for reason, count in sorted(a.skipped.items(), key=lambda item: -item[1]):
        text.append(f" + {count} {reason}", style="dim")
    if a.pending:
        text.append(f" + {a.pending} pending")
    text.append(" ✓" if a.adds_up else " ✗ does not add up", "green" if a.adds_up else "bold red")
    return text


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "–"


def sparkline(values: list[float]) -> str:
    """The values as one line of bars, scaled to their own range."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
