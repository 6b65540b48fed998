"""What a training on examples looks like in the terminal: a bar, or a line for each measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from agentrl.console.output import console, plain, print_line, print_sentences, whole
from agentrl.console.report import serve_command
from agentrl.console.tables import NAME_WIDTH, facts, sparkline
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import shown
from agentrl_trainer.models.saved_lora import is_reward_model

if TYPE_CHECKING:
    from agentrl.config.settings.models import ModelSettings
    from agentrl.offline.run import OfflineSummary

_CURVE_WIDTH = 48
_LINES = 20  # about, of a run without a terminal
_MEASURED = {
    "rewards/accuracies": ("held-out accuracy", ".1%"),
    "rewards/margins": ("held-out margin", ".3g"),
    "rewards/explained": ("held-out R²", ".3g"),
}


class OfflineDisplay(Progress):
    """Shows a run. On a terminal it is a bar; elsewhere some steps and every measure are lines."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"), console=console, disable=not console.is_interactive,
        )  # fmt: skip
        self._bar = self.add_task("")
        self._steps = 0

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps
        self.update(self._bar, total=steps, completed=done)

    def step(self, row: Mapping[str, Any]) -> None:
        step, loss = row["step"], f"loss {row['loss']:.4f}"
        self.update(self._bar, completed=step, description=loss)
        if self.disable and (step % max(1, self._steps // _LINES) == 0 or step == self._steps):
            print_line(f"step {step:>4}/{self._steps}  {loss}")

    def measured(self, step: int, loss: float, best: int) -> None:
        said = f"step {step:>4}/{self._steps}  held-out loss {loss:.4f}"
        print_line(said + ("  (best)" if best == step else ""))

    def note(self, message: str) -> None:
        print_sentences(f"note: {plain(message)}", "yellow")


def offline_report(folder: RunFolder, summary: OfflineSummary, model: ModelSettings) -> Group:
    """Show the losses, how held-out pairs or scores were told apart, and where things are."""
    losses, known = summary.loss, summary.held_out
    said = f"{losses[0]:.4f} → [b]{losses[-1]:.4f}[/]" if losses else "never finite"
    drawn = sparkline(losses[-_CURVE_WIDTH:])
    rows: list[tuple[str, str | Text]] = [("loss", f"{said} in {summary.steps} steps  {drawn}")]
    if (best := summary.best) is not None:
        first, last = known[min(known)], known[max(known)]
        said = f"{first:.4f} → {last:.4f}, best {known[best]:.4f} at step {best}"
        rows.append(("held-out loss", said))
    metrics = folder.read_metrics()
    for name, (what, form) in _MEASURED.items():
        values = (row.get(f"eval/{name}") for row in metrics)
        if found := [value for value in values if value is not None]:
            rows.append((what, f"{found[0]:{form}} → [b]{found[-1]:{form}}[/]"))
    if summary.why:
        rows.append(("ended by", Text(summary.why)))
    rows.append(("time", f"{summary.seconds:.0f} s"))
    paths = [("curve", folder.picture), ("adapter", folder.adapter)]
    paths += [("best adapter", folder.best_adapter)] if known else []
    places = [whole((f"{name:<{NAME_WIDTH}}  ", "dim"), shown(path)) for name, path in paths]
    adapter = folder.best_adapter if known else folder.adapter
    use = ("serve it:  ", serve_command(adapter, model))
    if is_reward_model(adapter):
        use = ("train with it:  ", f"agentrl train AGENT --rewards model:{shown(folder.root)}")
    command = whole(use[0], (use[1], "bold cyan"))
    return Group("[b green]trained[/]", facts(rows), *places, command)
