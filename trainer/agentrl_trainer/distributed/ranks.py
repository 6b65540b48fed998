"""Several ranks that train as one learner: the first in this process, each other in its own.

    base model ─ Learner ─ Rank 0 ┐
                                  ├ torch.distributed (gloo or NCCL)
    follower process: ─── Rank 1.. ┘

Calls that compute are sent to the followers, and made here too. Everything else, such as saving an
adapter, is this process's alone, because all ranks have equal weights. So when a follower dies, no
weights are lost: the call fails, and the next one starts new followers from the weights here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.plan import Call, FollowerPlan
from agentrl_trainer.distributed.rank import Rank
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.losses import CustomLoss, custom_slopes
from agentrl_trainer.learner.step_stats import StepStats

COMPUTED = {
    "forward", "values", "with_temperature", "with_reference", "with_proximal", "finite_rows",
    "forward_backward", "optim_step",
}  # fmt: skip
"""Calls that all ranks make together."""
STRUCTURE = {"add_adapter", "remove_adapter", "add_reference"}
"""Calls that each rank makes for itself, and that new followers repeat."""
STATE = {"load_state_dict", "discard_gradients"}
"""Calls that each rank makes for itself; new followers get the state that they led to."""
_LAST_WORDS_S = 10.0


class RankError(RuntimeError):
    """A rank ended, and with it what all ranks were computing."""


@dataclass(slots=True)
class _Follower:
    process: subprocess.Popen[bytes]
    pipe: Connection

    def why_ended(self, timeout_s: float | None) -> str | None:
        """Wait for its next word, or its end; return why it ended, None if it did not."""
        with contextlib.suppress(EOFError, OSError):
            return self.pipe.recv() if self.pipe.poll(timeout_s) else None
        code = self.process.wait()
        return f"it was killed by signal {-code}" if code < 0 else f"its exit code was {code}"

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class RankedLearner:
    """A learner whose computing calls are made by ``plan.size`` ranks together.

    Args:
        learner: of this process, the first rank.
        plan: of followers, but for their rank and address, and what has been called since.

    Raises:
        RankError: by a call during which a rank ended. Gradients that no ``optim_step`` has
            applied are lost then.
    """

    def __init__(self, learner: Learner, plan: FollowerPlan) -> None:
        self._rank, self._plan = Rank(learner), plan
        self._followers: list[_Follower] = []
        self._joined = False
        self._structure: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        if name not in COMPUTED | STRUCTURE | STATE:
            return getattr(self._rank, name)

        def call(*args: Any, **options: Any) -> Any:
            try:
                if name in COMPUTED and not self._followers:
                    self._start()
                self._send((name, args, options))
                found = getattr(self._rank, name)(*args, **options)
            except Exception as error:
                self._fail(error)
                raise
            if name in STRUCTURE:
                self._structure.append((name, args, options))
            return found

        return call

    def forward_backward_custom(
        self, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        """Add the gradient of any function of the log-probs, which is called in this process."""
        loss, metrics, slopes = custom_slopes(rows, self.forward(rows), function)
        weighted = [
            replace(
                row, advantages=[-slope for slope in own],
                extra={name: column for name, column in row.extra.items() if name == "temperature"},
            )
            for row, own in zip(rows, slopes, strict=True)
        ]  # fmt: skip
        stats = self.forward_backward(weighted, "cross_entropy", None, 1.0)
        return replace(stats, loss=loss), metrics

    def close(self) -> None:
        """End the followers."""
        if self._joined:
            dist.destroy_process_group()
        self._joined = False
        while self._followers:
            self._followers.pop().end()

    # ---- followers

    def _start(self) -> None:
        if dist.is_initialized():
            raise ValueError("trainers: this process is a rank already; close its other service")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        plan = replace(
            self._plan, structure=self._structure, address=address,
            device=self._rank.learner.base.device.type, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._followers = [_start(replace(plan, rank=rank)) for rank in range(1, plan.size)]
        for rank, follower in enumerate(self._followers, start=1):
            if (why := follower.why_ended(None)) is not None:
                raise RankError(f"rank {rank} of {plan.size} could not start: {why}")
        plan.join()
        self._joined = True
        self._send(("load_state_dict", (self._rank.state_dict(),), {}))

    def _send(self, call: Call) -> None:
        pickled = pickle.dumps(call, pickle.HIGHEST_PROTOCOL) if self._followers else b""
        for follower in self._followers:
            with contextlib.suppress(OSError):  # it ended; the first collective finds out
                follower.pipe.send_bytes(pickled)

    def _fail(self, error: Exception) -> None:
        """End all followers; raise RankError if one of them ended first."""
        ended: dict[int, str | None] = {}
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):  # of a collective
            numbered = enumerate(self._followers, start=1)
            ended = {rank: follower.why_ended(_LAST_WORDS_S) for rank, follower in numbered}
        self.close()
        self._rank.discard_gradients()
        for rank, why in ended.items():
            if why is not None:
                raise RankError(f"rank {rank} of {self._plan.size} ended: {why}") from error


def _start(plan: FollowerPlan) -> _Follower:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "agentrl_trainer.distributed.follower", str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    theirs.close()
    ours.send(plan)
    return _Follower(process, ours)
