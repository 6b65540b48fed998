"""What a follower does first, to die later: a setup call of ``RankPlan``."""

from __future__ import annotations

import os
import signal

from agentrl_trainer.distributed.plan import RankPlan


def at_the_meeting() -> None:
    RankPlan.join = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
