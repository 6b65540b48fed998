"""One self-contained HTML file about a run, to share: the same parts as on the run's pages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from agentrl.config.setting_names import flattened
from agentrl.history.evaluations import Paired
from agentrl.history.rollout.trace import longest_calls
from agentrl.history.rollout_table import Query, find_rollouts
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
        evaluations = evaluations_of(run) | {"links": False}
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
    """Return conversations about tasks that flipped, before and after; without any, of the best
    and the worst rollout of the last step."""
    paired: Paired | None = evaluations["paired"]
    flips = [*paired.gained[:_EXAMPLES], *paired.lost[:_EXAMPLES]] if paired else []
    outcomes = [outcome for flip in flips for outcome in flip]
    steps = [evaluations["before"], evaluations["after"]] * len(flips)
    about = {
        one.rollout: f"Task {one.task} at step {step}: {one.successes} of {one.samples} succeeded"
        for one, step in zip(outcomes, steps, strict=True)
    } or _best_and_worst(run)
    calls = longest_calls(run.store, run.id, list(about))
    return [(said, chat_of(call)) for said, call in zip(about.values(), calls, strict=True) if call]


def _best_and_worst(run: OpenRun) -> dict[str, str]:
    """Return what to say of two rollouts of the last step that has any which ended, by id."""
    ended = "status in ('completed', 'failed')"
    last = find_rollouts(run.index, Query(ended, sort="-step", limit=1)).rows
    if not last:
        return {}
    of_step = f"{ended} and step == {last[0]['step']}"
    best, worst = (
        find_rollouts(run.index, Query(of_step, sort=sort, limit=1)).rows[0]
        for sort in ("-reward", "reward")
    )
    return {
        row["id"]: f"Step {row['step']}, {row['purpose']} task {row['task']}: "
        + ("no reward" if row["reward"] is None else f"reward {row['reward']:+.4g}")
        for row in (best, worst)
    }
