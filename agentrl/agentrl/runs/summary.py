"""How a run ended: what its folder keeps, and what the command line shows."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.runs.excerpts import answer_excerpt, prompt_excerpt
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl_tracer.schemas import Accounting, Call, CallState, Purpose
from agentrl_tracer.store import Store

_REPLIES = 4  # shown at most
_INK, _GRID = "#24292f", "#d8dee4"
_REWARD_COLOR, _HELD_OUT_COLOR = "#0969da", "#bc4c00"


class Reply(NamedTuple):
    """What the agent's model said to one held-out task, before and after."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    folder: RunFolder
    steps: int
    rewards: list[float | None]
    """The mean of each step; None where nothing was rewarded."""
    accounting: Accounting
    held_out: list[tuple[int, float]]
    replies: list[Reply]
    seconds: dict[str, float]

    @property
    def learned_nothing(self) -> bool:
        """Steps were made, and not one call trained."""
        return self.steps > 0 and not self.accounting.trained


def summarise(
    folder: RunFolder,
    store: Store,
    run_id: str,
    step: int,
    *,
    model: str,
    adapters: Collection[str],
    eval_ids: Sequence[str],
    seconds: Mapping[str, float],
) -> Summary:
    """Put the final adapters, the picture and ``summary.json`` into the folder.

    Args:
        step: the last one.
        seconds: wall-clock time by what it went into.
    """
    rows = folder.read_metrics()
    shutil.rmtree(folder.adapter, ignore_errors=True)
    for name in adapters:
        final = folder.adapter if len(adapters) == 1 else folder.adapter / name
        shutil.copytree(folder.adapter_version(name, step), final)
    draw_learning_curve(rows, f"{folder.name}: {model}", folder.picture)
    summary = Summary(
        folder=folder,
        steps=step,
        rewards=[row[REWARD] for row in rows if REWARD in row],
        accounting=store.accounting(run_id),
        held_out=sorted((row["step"], row[HELD_OUT]) for row in rows if HELD_OUT in row),
        replies=_replies(store, run_id, eval_ids, step),
        seconds={name: round(value, 2) for name, value in seconds.items()},
    )
    written = {"steps": step, "held_out": summary.held_out, "reward": summary.rewards}
    calls = asdict(summary.accounting) | {"adds_up": summary.accounting.adds_up}
    folder.write_json(folder.summary, written | {"seconds": summary.seconds, "calls": calls})
    return summary


def _replies(store: Store, run_id: str, eval_ids: Sequence[str], step: int) -> list[Reply]:
    """Return replies to the same held-out tasks before the first step and after the last."""
    before, after = (_first_calls(store, run_id, at) for at in (0, step))
    return [
        Reply(
            prompt_excerpt(before[task].request),
            answer_excerpt(before[task].response),
            answer_excerpt(after[task].response),
        )
        for task in [one for one in eval_ids if one in before and one in after][:_REPLIES]
    ]


def _first_calls(store: Store, run_id: str, step: int) -> dict[str, Call]:
    """Return the first answered call of each evaluation rollout of a step, by task."""
    rollouts = store.rollouts(run_id, step=step, purpose=Purpose.EVAL)
    by_id = {rollout.id: rollout.task_id for rollout in rollouts}
    found: dict[str, Call] = {}
    for call in store.calls(rollout_ids=list(by_id)):
        if call.state is CallState.COMPLETED and call.rollout_id:
            found.setdefault(by_id[call.rollout_id], call)
    return found


def draw_learning_curve(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw mean reward of the training rollouts, and held-out accuracy, over steps as a PNG."""
    # The object interface: pyplot would pick a backend for the process and hold every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    reward, held_out = (
        [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        for name in (REWARD, HELD_OUT)
    )
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    left.set_title(title, loc="left", color=_INK, fontsize=12)
    left.set_xlabel("optimizer step", color=_INK)
    left.set_ylabel("mean reward of training rollouts", color=_REWARD_COLOR)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(color=_GRID, linewidth=0.6)
    left.spines[["top"]].set_visible(False)
    if reward:
        left.plot(*zip(*reward, strict=True), color=_REWARD_COLOR, linewidth=1.8, zorder=3)
    if held_out:
        right = left.twinx()
        right.set_ylabel("held-out accuracy", color=_HELD_OUT_COLOR)
        right.set_ylim(-0.04, 1.1)
        right.spines[["top"]].set_visible(False)
        right.plot(*zip(*held_out, strict=True), "o--", color=_HELD_OUT_COLOR, markersize=4.5)
        right.annotate(
            f"{held_out[-1][1]:.0%}", held_out[-1], textcoords="offset points", xytext=(0, 6),
            ha="right", color=_HELD_OUT_COLOR,
        )  # fmt: skip
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
