"""What a follower does first, to die later or to compute otherwise: setup calls of ``RankPlan``."""

from __future__ import annotations

import os
import signal

from agentrl_trainer.distributed.plan import RankPlan
from agentrl_trainer.learner import model_support
from agentrl_trainer.learner.logprobs import TokenLogprobs


def at_the_meeting() -> None:
    RankPlan.join = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def at_the_trial() -> None:
    """While it tries the model in the middle of other ranks' trials."""
    model_support.decoder_states = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def with_few_logits() -> None:
    TokenLogprobs.__init__.__kwdefaults__["max_logits"] = 2000
