"""How a run ended: what its folder keeps, and what the command line shows.

Knows the run's folder and store. Does not know how it was trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.runs.folder import RunFolder
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl_tracer.schemas import Accounting, Call, CallState, Purpose
from agentrl_tracer.store import Store


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent's model said to one held-out task, before and after."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    folder: RunFolder
    adapter: Path
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
    """Puts the final adapters, the picture and ``summary.json`` into the folder.

    Args:
        step: the last one.
        seconds: wall-clock time by what it went into.
    """
    rows = folder.read_metrics()
    _keep_adapters(folder, adapters, step)
    draw_learning_curve(rows, f"{folder.name}: {model}", folder.picture)
    accounting = store.accounting(run_id)
    summary = Summary(
        folder=folder,
        adapter=folder.adapter,
        steps=step,
        rewards=[row[REWARD] for row in rows if REWARD in row],
        accounting=accounting,
        held_out=sorted((row["step"], row[HELD_OUT]) for row in rows if HELD_OUT in row),
        replies=_replies(store, run_id, eval_ids, step),
        seconds={name: round(value, 2) for name, value in seconds.items()},
    )
    folder.write_json(
        folder.summary,
        {
            "steps": step,
            "held_out": summary.held_out,
            "reward": summary.rewards,
            "seconds": summary.seconds,
            "calls": {
                "proxied": accounting.proxied,
                "recorded": accounting.recorded,
                "trained": accounting.trained,
                "skipped": accounting.skipped,
                "adds_up": accounting.adds_up,
            },
        },
    )
    return summary


def _keep_adapters(folder: RunFolder, adapters: Collection[str], step: int) -> None:
    if folder.adapter.exists():
        shutil.rmtree(folder.adapter)
    for name in adapters:
        final = folder.adapter if len(adapters) == 1 else folder.adapter / name
        shutil.copytree(folder.adapter_version(name, step), final)


def _replies(
    store: Store, run_id: str, eval_ids: Sequence[str], step: int, count: int = 4
) -> list[Reply]:
    """Replies to the same held-out tasks before the first step and after the last."""
    before, after = (_first_calls(store, run_id, at) for at in (0, step))
    shared = [task for task in eval_ids if task in before and task in after]
    return [
        Reply(_prompt(before[task]), _answer(before[task]), _answer(after[task]))
        for task in shared[:count]
    ]


def _first_calls(store: Store, run_id: str, step: int) -> dict[str, Call]:
    """The first answered call of each evaluation rollout of a step, by task."""
    rollouts = store.rollouts(run_id, step=step, purpose=Purpose.EVAL)
    by_id = {rollout.id: rollout.task_id for rollout in rollouts}
    found: dict[str, Call] = {}
    for call in store.calls(rollout_ids=list(by_id)):
        if call.state is CallState.COMPLETED and call.rollout_id:
            found.setdefault(by_id[call.rollout_id], call)
    return found


def _prompt(call: Call) -> str:
    messages = (call.request or {}).get("messages") or [{}]
    return str(messages[-1].get("content", ""))


def _answer(call: Call) -> str:
    choices = (call.response or {}).get("choices") or [{}]
    message = choices[0].get("message", {})
    tools = [tool.get("function", {}) for tool in message.get("tool_calls") or []]
    said = [f"{tool.get('name')}({tool.get('arguments')})" for tool in tools]
    return " ".join(filter(None, [message.get("content"), *said]))
