"""Reward by the reward model whose run folder the variable TASTE names.

Held-out tasks that have a label get their true reward. So the evaluations of a training see what
the reward model does not: a policy that games it.
"""

import os
import sys
from functools import cache
from pathlib import Path

from agentrl.rewards import Trace, group_reward
from agentrl.scoring.reward_model import RewardModel

sys.path.append(str(Path(__file__).parent))
from player import plays_along


@cache
def model() -> RewardModel:
    return RewardModel(os.environ["TASTE"])


@group_reward
def taste(traces: list[Trace]) -> list[float | None]:
    if traces[0].task.get("labeled"):
        return [plays_along(one.answer, one.task["n"]) for one in traces]
    return model()(traces)
