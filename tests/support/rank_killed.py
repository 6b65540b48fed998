"""What a follower does first, to die later: a setup call of ``RankPlan``."""

from __future__ import annotations

import os
import signal

from agentrl_trainer.distributed.plan import RankPlan
from agentrl_trainer.learner import model_support


def at_the_meeting() -> None:
    RankPlan.join = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def at_the_trial() -> None:
    """While it tries the model in the middle of other ranks' trials."""
    model_support.decoder_states = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
