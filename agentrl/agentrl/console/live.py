"""What a run looks like in the terminal: a live panel, or a line per step where there is none."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Self

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from agentrl.console.output import plain, print_line, print_sentences
from agentrl.console.report import calls_line
from agentrl.console.tables import facts, sparkline
from agentrl.history.overview import Activity, activity_of
from agentrl.runs.excerpts import excerpt
from agentrl.runs.metric_names import DIFFERENCE, REWARD
from agentrl_tracer.schemas import Accounting, Attempt, Rollout
from agentrl_tracer.store import Store, StoreError

_CURVE_WIDTH = 48
_FAILURES = 3
_LOOK_S = 1.0


class TrainDisplay:
    """Shows a training run. On a terminal it is live; elsewhere every step prints one line.

    Args:
        since: when the run began, by ``time.perf_counter``.
    """

    def __init__(self, console: Console, title: str, *, since: float) -> None:
        self._console, self._title, self._started = console, title, since
        self._steps = self._step = self._first = 0
        self._phase = "starting"
        self._ahead: Callable[[], tuple[int, int]] | None = None
        self._row: Mapping[str, Any] = {}
        self._rewards: list[float] = []
        self._held_out: list[float] = []
        self._accounting: Accounting | None = None
        self._activity = Activity()
        self._failures: dict[str, tuple[Rollout, Attempt]] = {}  # the newest last
        self._ended = threading.Event()
        self._size = console.size
        self._training_since: float | None = None
        self._progress = Progress(
            TextColumn("step [b]{task.completed}[/]/{task.fields[steps]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[eta]}"),
            expand=True,
        )
        self._bar = self._progress.add_task("steps", total=None, eta="", steps="…")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._phase = "stopped" if kind else "finished"
        self._activity = Activity()
        self._ended.set()
        if self._console.is_interactive:
            self._live.stop()

    def watch(self, store: Store, run_id: str) -> None:
        """On a terminal, look once a second at what the run's agents do."""
        if self._console.is_interactive:
            own = Store(store.url, patience_s=0, read_only=True)  # it must not wait
            threading.Thread(target=self._look, args=(own, run_id), daemon=True).start()

    def _look(self, store: Store, run_id: str) -> None:
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(StoreError):  # the run itself says that the store is away
                seen = activity_of(store, run_id, self._step, _FAILURES)
                self._failures |= {one[1].id: one for one in reversed(seen.failures)}
                if not self._ended.is_set():
                    self._activity = seen
        store.close()

    def begin(self, steps: int, done: int) -> None:
        """Show how far the run goes, and how much of it is done already."""
        self._steps, self._step, self._first = steps, done, done
        self._progress.update(self._bar, total=steps, completed=done, steps=steps)

    def phase(
        self, name: str, done: int | None = None, total: int | None = None, *,
        ahead: Callable[[], tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        """Show what is going on now, and how far it is.

        ``ahead`` returns, of the rollouts of later steps, how many are finished, and of how many.
        """
        self._phase = name if total is None else f"{name} {done}/{total}"
        self._ahead = ahead
        if name == "rollouts" and self._training_since is None:
            self._training_since = time.monotonic()

    def step(self, row: Mapping[str, Any], accounting: Accounting) -> None:
        """Show the metrics of a complete step."""
        self._row, self._accounting = row, accounting
        self._step = int(row["step"])
        self._rewards.append(float(row[REWARD]))  # NaN: nothing was rewarded
        self._progress.update(self._bar, completed=self._step, eta=f"ETA {self._eta()}")
        self._print(
            f"step {self._step:>3}/{self._steps}",
            f"reward {_signed(row[REWARD])}",
            f"held-out {self._accuracy()}",
            f"{row['tokens_per_second']:.0f} tok/s",
            f"calls {calls_line(accounting)}",
            f"Δlogprob {row[DIFFERENCE]:.1e}",
            *self._asynchronous(),
            f"ETA {self._eta()}",
        )

    def evaluated(self, step: int, accuracy: float) -> None:
        self._held_out.append(accuracy)
        self._print(f"step {step:>3}/{self._steps}", f"held-out accuracy {accuracy:.1%}")

    def note(self, message: str) -> None:
        """Show something that went wrong and was dealt with, above the panel."""
        print_sentences(f"note: {plain(message)}", "yellow", self._console)  # it may quote an agent

    def _print(self, *parts: str) -> None:
        if not self._console.is_interactive:
            print_line("  ".join(parts), to=self._console)

    def _asynchronous(self) -> list[str]:
        """Say how stale the trained rollouts were; empty if the run is synchronous."""
        row = self._row
        replaced = row.get("groups/resampled")
        parts = [f"{replaced} groups replaced"] if replaced else []
        if row.get("staleness/max") or row.get("groups/ahead"):
            parts.append(f"staleness {row['staleness/mean']:.1f} (max {row['staleness/max']})")
            parts.append(f"overlapped {row['seconds/overlapped']:.1f} s")
        return parts

    def _accuracy(self) -> str:
        return f"{self._held_out[-1]:.1%}" if self._held_out else "–"

    def _eta(self) -> str:
        made = self._step - self._first
        if self._training_since is None or made <= 0:
            return "–"
        per_step = (time.monotonic() - self._training_since) / made
        return _duration(per_step * (self._steps - self._step))

    def _render(self) -> Panel:
        if (size := self._console.size) != self._size:
            # The terminal has wrapped the panel anew: its old lines are not where they were.
            self._size = size
            self._console.control(Control.clear(), Control.home())
        phase = [(self._phase, "bold cyan")]
        if self._ahead is not None:
            phase.append(("   rollouts of the next steps {}/{}".format(*self._ahead()), "cyan"))
        if running := self._activity.running:
            phase.append((f"   {running} running", "cyan"))
        phase.append((f"   {_duration(time.perf_counter() - self._started)} elapsed", "dim"))
        parts = Group(self._progress, Text.assemble(*phase), facts(self._facts()))
        return Panel(parts, title=f"[b]{self._title}[/]", title_align="left", border_style="blue")

    def _facts(self) -> Iterator[tuple[str, Text | str]]:
        """Yield what the panel says, the longest last: a low terminal cuts it off."""
        reward = _signed(self._rewards[-1]) if self._rewards else "–"
        for name, value, curve, color in (
            ("mean reward", reward, self._rewards, "green"),
            ("held-out accuracy", self._accuracy(), self._held_out, "magenta"),
        ):
            drawn = sparkline(curve[-_CURVE_WIDTH:])
            yield name, Text.assemble((value, f"bold {color}"), (f"  {drawn}", color))
        if row := self._row:
            yield "sampled", f"{row['tokens_per_second']:,.0f} tokens/s"
            yield "sampler, trainer", f"largest log-prob difference {row[DIFFERENCE]:.1e}"
        if beside := self._asynchronous():
            yield "rollouts", "  ".join(beside)
        if since := self._activity.longest_since:
            yield (
                "longest running",
                _line(_duration(time.time() - since), self._activity.longest_task),
            )
        for rollout, attempt in list(self._failures.values())[: -_FAILURES - 1 : -1]:
            error = excerpt((attempt.error or "").strip().rpartition("\n")[2]) or attempt.state
            yield f"failed, step {rollout.step}", _line(rollout.id, error, "red")
        if self._accounting:
            yield "calls", calls_line(self._accounting)


def _line(what: str, said: str, style: str = "") -> Text:
    return Text.assemble(what, "  ", (said, style), no_wrap=True, overflow="ellipsis")


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "–"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
