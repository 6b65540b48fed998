"""The learning rate over a run: warm-up, then a schedule. A pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, step: int, steps: int, warmup_steps: int = 0) -> float:
    """By what to multiply the peak learning rate in ``step`` of ``steps``, counted from 1.

    The first ``warmup_steps`` rise in equal parts; the first step after them has the whole rate.
    From there "constant" stays, while "linear" and "cosine" (half a period, arXiv:1608.03983
    without restarts) fall; they would reach zero in the step after the last. Steps beyond the last
    (a run that was made longer) get the last one's. A function of the step alone, so that a
    resumed run goes on as if it had never stopped.
    """
    if step < 1 or steps < 1 or warmup_steps < 0:
        raise ValueError(f"steps count from 1: step {step} of {steps}, {warmup_steps} of warm-up")
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    done = (min(step, steps) - 1 - warmup_steps) / max(steps - warmup_steps, 1)
    if schedule == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))
