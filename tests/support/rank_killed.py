"""What a follower does first, to die later: a setup call of ``FollowerPlan``."""

from __future__ import annotations

import os
import signal

from agentrl_trainer.distributed.plan import FollowerPlan


def at_the_meeting() -> None:
    FollowerPlan.join = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
