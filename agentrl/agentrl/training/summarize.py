"""End a training run: write what its folder keeps, and summarize it for the command line."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from agentrl.history.rollout.conversation import answer_excerpt, prompt_excerpt
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.runs.summary import Ending, Reply, Summary
from agentrl_tracer.schemas import Call, CallState, Purpose

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun

_REPLIES = 4  # shown at most


def summarize(run: TrainingRun, step: int, ended: Ending | None) -> Summary:
    """Put the final adapters, the picture and ``summary.json`` into the folder.

    ``step`` is the last one, ``ended`` why the run did not go on.
    """
    folder = run.folder
    rows = folder.read_metrics()
    shutil.rmtree(folder.adapter, ignore_errors=True)
    for name, final in folder.layout(folder.adapter, list(run.config.trained)).items():
        shutil.copytree(folder.adapter_version(name, step), final)
    draw_learning_curve(rows, f"{folder.name}: {run.config.model.name}", folder.picture)
    run.metrics_log.show_picture(step)
    verified = run.store.verify(run.run_id)
    if verified.fault:
        run.display.note(f"the run's calls do not add up: {verified.fault}")
    summary = Summary(
        folder=folder,
        steps=step,
        rewards=[row[REWARD] for row in rows if REWARD in row],
        accounting=verified.counted,
        held_out=sorted((row["step"], row[HELD_OUT]) for row in rows if HELD_OUT in row),
        replies=_replies(run, step),
        seconds={name: round(value, 2) for name, value in run.timer.spent.items()},
        cores_busy={name: round(value, 3) for name, value in run.timer.shares().items()},
        ended=ended,
    )
    written = {"steps": step, "held_out": summary.held_out, "reward": summary.rewards}
    written |= {"best": summary.best, "spent": asdict(run.guards.budget.spent())}
    written |= {"ended_by": ended and ended.guard, "why": ended and ended.sentence}
    calls = asdict(summary.accounting) | {"adds_up": verified.fault is None}
    took = {"seconds": summary.seconds, "cores_busy": summary.cores_busy}
    folder.write_json(folder.summary, written | took | {"calls": calls})
    return summary


def _replies(run: TrainingRun, step: int) -> list[Reply]:
    """Return replies to the same held-out tasks before the first step and after the last."""
    before, after = (_first_calls(run, at) for at in (0, step))
    return [
        Reply(
            prompt_excerpt(before[task].request),
            answer_excerpt(before[task].response),
            answer_excerpt(after[task].response),
        )
        for task in [one for one in run.eval_ids if one in before and one in after][:_REPLIES]
    ]


def _first_calls(run: TrainingRun, step: int) -> dict[str, Call]:
    """Return the first answered call of each evaluation rollout of a step, by task."""
    rollouts = run.store.rollouts(run.run_id, step=step, purpose=Purpose.EVAL)
    by_id = {rollout.id: rollout.task_id for rollout in rollouts}
    found: dict[str, Call] = {}
    for call in run.store.calls(rollout_ids=list(by_id)):
        if call.state is CallState.COMPLETED and call.rollout_id:
            found.setdefault(by_id[call.rollout_id], call)
    return found
