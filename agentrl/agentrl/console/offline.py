"""What a training on examples looks like in the terminal: a bar, or a line for each measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from agentrl.console.output import plain, print_line, print_sentences, whole
from agentrl.console.report import adapter_flags, serve_command
from agentrl.console.tables import NAME_WIDTH, facts, sparkline
from agentrl.runs.folder import RunFolder, is_reward_model
from agentrl.runs.recorded import shown

if TYPE_CHECKING:
    from agentrl.config.settings.models import ModelSettings
    from agentrl.offline.run import OfflineSummary

_CURVE_WIDTH = 48
_LINES = 20  # about, of a run without a terminal


class OfflineDisplay:
    """Shows a run. On a terminal it is a bar; elsewhere some steps and every measure are lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[loss]}"), console=console,
            disable=not console.is_interactive,
        )  # fmt: skip
        self._task = self._bar.add_task("steps", total=None, loss="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps
        self._bar.update(self._task, total=steps, completed=done)

    def step(self, row: Mapping[str, Any]) -> None:
        step, loss = row["step"], f"loss {row['loss']:.4f}"
        self._bar.update(self._task, completed=step, loss=loss)
        every = max(1, self._steps // _LINES)
        if not self._console.is_interactive and (step % every == 0 or step == self._steps):
            print_line(f"step {step:>4}/{self._steps}  {loss}", to=self._console)

    def measured(self, step: int, loss: float, best: int) -> None:
        said = f"step {step:>4}/{self._steps}  held-out loss {loss:.4f}"
        print_line(said + ("  (best)" if best == step else ""), to=self._console)

    def note(self, message: str) -> None:
        print_sentences(f"note: {plain(message)}", "yellow", self._console)


def offline_report(summary: OfflineSummary, model: ModelSettings) -> Group:
    """Show the losses, and where things are."""
    losses, known, folder = summary.losses, summary.held_out, summary.folder
    drawn = sparkline(losses[-_CURVE_WIDTH:])
    rows: list[tuple[str, str | Text]] = [
        ("loss", f"{losses[0]:.4f} → [b]{losses[-1]:.4f}[/] in {summary.steps} steps  {drawn}")
    ]
    if known and summary.best is not None:
        best = f"best {known[summary.best]:.4f} at step {summary.best}"
        rows.append(("held-out loss", f"{known[min(known)]:.4f} → {known[max(known)]:.4f}, {best}"))
    rows += _measured(folder)
    if summary.why:
        rows.append(("ended by", Text(summary.why)))
    rows.append(("time", f"{summary.seconds:.0f} s"))
    paths = [("curve", folder.picture), ("adapter", folder.adapter)]
    paths += [("best adapter", folder.best_adapter)] if known else []
    places = [whole((f"{name:<{NAME_WIDTH}}  ", "dim"), shown(path)) for name, path in paths]
    adapter = folder.best_adapter if known else folder.adapter
    if is_reward_model(adapter):
        train = f"agentrl train AGENT --tasks TASKS --rewards model:{shown(folder.root)}"
        use = whole("train with it:  ", (train, "bold cyan"))
        return Group("[b green]trained[/]", facts(rows), *places, use)
    evaluate = f"agentrl eval AGENT --tasks TASKS {adapter_flags(adapter, model)}"
    commands = [
        whole("serve it:  ", (serve_command(adapter, model), "bold cyan")),
        whole("evaluate it:  ", (evaluate, "bold cyan")),
    ]
    return Group("[b green]trained[/]", facts(rows), *places, *commands)


_REWARDS = {
    "accuracies": ("held-out accuracy", ".1%"),
    "margins": ("held-out margin", ".3g"),
    "explained": ("held-out R²", ".3g"),
}


def _measured(folder: RunFolder) -> list[tuple[str, str | Text]]:
    """Show how held-out pairs or scores were told apart, before and after."""
    measured = folder.read_metrics()
    rows: list[tuple[str, str | Text]] = []
    for name, (what, form) in _REWARDS.items():
        known = [row[key] for row in measured if (key := f"eval/rewards/{name}") in row]
        if known:
            rows.append((what, f"{known[0]:{form}} → [b]{known[-1]:{form}}[/]"))
    return rows
