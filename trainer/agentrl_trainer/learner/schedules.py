"""Set the learning rate: its peak by the size of the model, and its schedule over a run."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, step: int, steps: int, warmup_steps: int = 0) -> float:
    """Compute the factor of the peak learning rate in ``step`` of ``steps``, counted from 1.

    The first ``warmup_steps`` rise in equal parts; the first step after them has the whole rate.
    From there "constant" stays, while "linear" and "cosine" (half a period, arXiv:1608.03983
    without restarts) fall, to reach zero in the step after the last. Steps beyond the last (a run
    that was made longer) get the last one's. A resumed run gets the same factors, because they
    depend on the step alone.
    """
    if step < 1 or steps < 1 or warmup_steps < 0:
        raise ValueError(f"steps count from 1: step {step} of {steps}, warmup_steps {warmup_steps}")
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    done = (min(step, steps) - 1 - warmup_steps) / max(steps - warmup_steps, 1)
    if schedule == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))


def default_learning_rate(parameters: int, alpha: float = 32.0) -> float:
    """Choose Adam's learning rate for LoRA by the size of the base model.

    A power law through two points: 1.5e-3 at 0.85 million parameters, measured on agentrl-tiny, and
    4e-5 at 4 billion, the usual recommendation (ten times that of full fine-tuning).

    The rank does not enter: the update is alpha / rank times a sum of ``rank`` products, each of
    which Adam moves by the same amount (Schulman et al., "LoRA Without Regret", 2025, who find the
    same best rate from rank 4 to 512; ``benchmarks/learning_rate`` finds it from 1 to 128). Alpha
    does: with B at zero the first updates are alpha times the rate, and both points are of alpha
    32.
    """
    small, large = (0.85e6, 1.5e-3), (4e9, 4e-5)
    exponent = math.log(large[1] / small[1]) / math.log(large[0] / small[0])
    return min(5e-3, small[1] * (parameters / small[0]) ** exponent) * 32.0 / alpha
