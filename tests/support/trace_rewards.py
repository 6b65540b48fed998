"""Rewards that runs of the tests compute after their rollouts; each call is written down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.rewards import Trace, group_reward


def _write_down(name: str, trace: Trace) -> None:
    if run := os.environ.get("TEST_RUN"):
        with (Path(run).parent / "scored.txt").open("a") as file:
            file.write(f"{name} {trace.attempt_id}\n")


def size(trace: Trace) -> dict[str, float]:
    """Two rewards by name."""
    _write_down("size", trace)
    return {"chars": len(trace.answer) / 10, "messages": 0.5 * len(trace.messages)}


async def even(trace: Trace) -> float | None:
    """None for odd tasks."""
    _write_down("even", trace)
    await asyncio.sleep(0.01)
    return None if trace.task["n"] % 2 else 1.0


@group_reward
def rank(traces: Sequence[Trace]) -> list[float]:
    """The share of the group that answered in fewer words."""
    for trace in traces:
        _write_down("rank", trace)
    sizes = sorted(len(trace.answer) for trace in traces)
    return [sizes.index(len(trace.answer)) / len(traces) for trace in traces]


def picky(trace: Trace) -> float:
    """Raises for every fourth task."""
    _write_down("picky", trace)
    if trace.task["n"] % 4 == 0:
        raise LookupError(f"no verdict on {trace.task['n']}\nand more")
    return 2.0


def leaves(trace: Trace) -> float:
    raise SystemExit("enough")


def text(trace: Trace) -> str:
    return "1"


def right(trace: Trace) -> float:
    return float(str(trace.task["n"]) in trace.answer)


def wordy(trace: Trace) -> float:
    """Long answers are good: what reward models of people's preferences tend to learn."""
    return min(len(trace.answer) / 40, 1.0)
