"""One self-contained HTML file about a run, to share: the same parts as on the run's pages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from agentrl.config.setting_names import flattened
from agentrl.history.evaluations import Paired
from agentrl.history.rollout.trace import longest_calls
from agentrl.history.sources import OpenRun, Sources
from agentrl.ui.pages.call import Chat, chat_of
from agentrl.ui.pages.evaluations import evaluations_of
from agentrl.ui.pages.runs import overview
from agentrl.ui.views import render, render_alone, without_links

_STYLES = ("app.css", "charts.css", "run.css", "evaluations.css", "rollout.css")
_SCRIPTS = ("echarts.min.js", "charts.js")
_NOT_SHARED = ("run.store", "run.folder", "models", "sampler.vllm.url", "gateway.", "tinker.")
"""Settings whose values may hold passwords, parameters of providers, or addresses."""
_EXAMPLES = 3
"""Tasks that flipped each way whose conversations are shown."""


def run_report(folder: Path) -> str:
    """Return the text of an HTML file about the run in a folder.

    Raises:
        ConfigError: this is no run folder.
    """
    with contextlib.closing(Sources(folder.absolute().parent)) as sources:
        run = sources.open(folder.absolute().name)
        while run.fill():
            pass
        evaluations = evaluations_of(run)
        settings = flattened(run.folder.read_config()).items()
        return render_alone(
            "report.html", _STYLES, _SCRIPTS, title=run.name,
            overview=without_links(render("run_figures.html", **overview(run))),
            evaluations=without_links(render("evaluation_figures.html", **evaluations)),
            examples=_examples(run, evaluations),
            settings={
                name: value
                for name, value in settings
                if not name.startswith(_NOT_SHARED) and value is not None
            },
        )  # fmt: skip


def _examples(run: OpenRun, evaluations: dict[str, Any]) -> list[tuple[str, Chat]]:
    """Return conversations about tasks that flipped, before and after."""
    paired: Paired | None = evaluations["paired"]
    flips = [*paired.gained[:_EXAMPLES], *paired.lost[:_EXAMPLES]] if paired else []
    outcomes = [outcome for flip in flips for outcome in flip]
    steps = [evaluations["before"], evaluations["after"]] * len(flips)
    calls = longest_calls(run.store, run.id, [outcome.rollout for outcome in outcomes])
    return [
        (f"Task {one.task} at step {step}: {one.successes} of {one.samples} right", chat_of(call))
        for one, step, call in zip(outcomes, steps, calls, strict=True)
        if call
    ]
