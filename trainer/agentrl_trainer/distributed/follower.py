"""The process of a rank beside the first: makes the calls that it is sent, until its pipe ends.

python -m agentrl_trainer.distributed.follower FILE_DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection
from pkgutil import resolve_name

import torch

from agentrl_trainer.distributed.plan import FollowerPlan
from agentrl_trainer.distributed.rank import Rank
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import load_base


def follow(pipe: Connection) -> None:
    plan: FollowerPlan = pipe.recv()
    torch.set_num_threads(plan.threads)
    for name, arguments in plan.setup:
        resolve_name(name)(*arguments)
    device = f"cuda:{plan.rank}" if plan.device == "cuda" else plan.device
    options = {**plan.model_options, "device": device}
    rank = Rank(Learner(load_base(plan.model, **options), **plan.learner_options))
    for name, arguments, named in plan.structure:
        getattr(rank, name)(*arguments, **named)
    pipe.send(None)  # ready
    plan.join()
    while True:
        name, arguments, named = pipe.recv()
        getattr(rank, name)(*arguments, **named)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the first rank has ended
        try:
            follow(pipe)
        except (EOFError, OSError):
            raise
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(1)  # its group's threads would wait for the others


if __name__ == "__main__":
    main()
