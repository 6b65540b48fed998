"""A rank beside the first: does what the first one sends.

As a process of the first one's machine, until their pipe ends:
python -m agentrl_trainer.distributed.follower FILE_DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

import torch

from agentrl_trainer.distributed.plan import RankPlan, SetupCall
from agentrl_trainer.distributed.rank import Rank
from agentrl_trainer.distributed.sharded import learner_of


class Follower:
    """``join``, ``load``, ``learn``, then any number of ``call``."""

    def __init__(self, setup: Sequence[SetupCall]) -> None:
        for name, arguments in setup:
            resolve_name(name)(*arguments)

    def do(self, pickled: bytes) -> None:
        """Call one of the methods below: (name, arguments, named arguments)."""
        name, args, named = pickle.loads(pickled)
        getattr(self, name)(*args, **named)

    def join(self, plan: RankPlan) -> None:
        self._plan = plan
        plan.join()

    def load(self) -> None:
        self._base = self._plan.load()

    def learn(self, options: Mapping[str, Any]) -> None:
        """Make the learner."""
        self._rank = Rank(learner_of(self._plan.shard)(self._base, **options))

    def call(self, threads: int, name: str, *args: Any, **named: Any) -> None:
        """Call a method of the rank, which may use so many threads."""
        torch.set_num_threads(threads)
        getattr(self._rank, name)(*args, **named)


def follow(pipe: Connection) -> None:
    follower = Follower(pipe.recv())
    pipe.send(None)  # ready
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):  # the first rank has ended
            return
        follower.do(message)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    try:
        follow(pipe)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}".rstrip(": "))
    sys.stdout.flush()
    os._exit(1)  # its group's threads would wait for the others


if __name__ == "__main__":
    main()
