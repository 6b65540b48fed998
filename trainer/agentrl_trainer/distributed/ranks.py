"""Several ranks that train as one learner: the first in this process, each other in its own.

    base model ─ Learner ─ Rank 0 ┐
                                  ├ torch.distributed (gloo or NCCL)
    follower: ─────────── Rank 1.. ┘

Calls that compute are sent to the followers, and made here too. Everything else, such as saving an
adapter, is this process's alone, because all ranks have equal weights. So when a follower dies, no
adapter is lost: the call fails, and the next one starts new followers from the weights here, unless
the follower had a part of the base model.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.heartbeats import Watch
from agentrl_trainer.distributed.plan import RankError, RankPlan
from agentrl_trainer.distributed.processes import FollowerProcess
from agentrl_trainer.distributed.rank import Rank
from agentrl_trainer.distributed.sharded import learner_of
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.losses import CustomLoss, custom_slopes
from agentrl_trainer.learner.step_stats import OptimStats, StepStats
from agentrl_trainer.models.devices import choose_device
from agentrl_trainer.models.loading import BaseModel

COMPUTED = {
    "forward", "values", "with_temperature", "with_reference", "with_proximal", "finite_rows",
}  # fmt: skip
"""Calls that all ranks make together, as they do ``forward_backward`` and ``optim_step``."""
STRUCTURE = {"add_adapter", "remove_adapter", "add_reference"}
"""Calls that each rank makes for itself, and that new followers repeat. Those that change weights
or gradients are not repeated: new followers get the state that they led to."""
_LAST_WORDS_S = 10.0
_GONE = "the other trainers have ended, and their parts of the base model with them; start anew"
_BY_PEER = "by peer"
"""In what gloo says of a connection whose other end is gone."""


class Followers:
    """The ranks beside this process, which is the first; see ``follower.Follower``."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.running: list[Any] = []
        self._watch: Watch | None = None
        """None where this process is in no group."""

    def start(self) -> RankPlan:
        """Start the followers, join their process group, and have them load the base model.

        Returns:
            This rank's plan.

        Raises:
            RankError: one could not start.
            ValueError: this process is a rank already.
        """
        if dist.is_initialized():
            raise ValueError("trainers: this process is a rank already; close its other service")
        plan = replace(self.plan, device=choose_device(self.plan.model_options["device"]).type)
        host, node = "127.0.0.1", ""
        if plan.launch == "ray":
            from agentrl_trainer.distributed.on_ray import own_address, own_node, start_actors

            self.running = start_actors(plan.size - 1, plan.setup, gpu=plan.device == "cuda")
            host, node = own_address(), own_node()
        else:
            self.running = [FollowerProcess(plan.setup) for _ in range(1, plan.size)]
        for rank, follower in enumerate(self.running, start=1):
            if (why := follower.why_ended(None)) is not None:
                raise RankError(f"rank {rank} of {plan.size} could not start: {why}")
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        # Ranks of a node follow each other: its own part of a process group is a row of them.
        self.running.sort(key=lambda one: (one.node != node, one.node))
        replicas = _replicas([node, *(one.node for one in self.running)])
        plan = replace(plan, host=host, port=port, replicas=replicas)
        for rank, follower in enumerate(self.running, start=1):
            follower.send(_message("join", replace(plan, rank=rank)))
        plan.join()
        self._watch = Watch(host, port, self.running)
        self.send("load")
        return plan

    def load(self, load: Callable[..., BaseModel]) -> BaseModel:
        """Load this rank's base model, or its part of it: then the others load theirs, too."""
        if not self.plan.shard:
            return load()
        try:
            return load(self.start().load)
        except Exception as error:
            self.end(error)
            raise

    def learner(self, base: BaseModel, options: Mapping[str, Any]) -> RankedLearner:
        """Make the learner of all ranks."""
        return RankedLearner(self, base, options)

    def send(self, name: str, *args: Any, **named: Any) -> None:
        """Have all followers call a method; does not wait."""
        message = _message(name, *args, **named) if self.running else b""
        for follower in self.running:
            follower.send(message)

    def end(self, error: Exception | None = None) -> None:
        """End all of them; after an ``error``, raise RankError if one of them ended first."""
        silent, ended = self._watch.end() if self._watch else {}, dict[int, str]()
        of_collective = isinstance(error, RuntimeError) and not isinstance(error, RankError)
        if of_collective or _BY_PEER in str(error):
            until = time.monotonic() + _LAST_WORDS_S
            for rank, follower in enumerate(self.running, start=1):
                left = max(until - time.monotonic(), 0.1)
                if (why := silent.get(rank) or follower.why_ended(left)) is not None:
                    ended[rank] = why
        while self.running:
            self.running.pop().end()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._watch = None
        self._name_first(ended, error)

    def check(self) -> None:
        """Look whether one has ended while all of them were idle.

        Raises:
            RankError: names it and why; the others run on until ``end``.
        """
        if (watch := self._watch) is not None:
            self._name_first(dict(watch.ended), None)

    def _name_first(self, ended: Mapping[int, str], error: Exception | None) -> None:
        """Raise RankError of the rank that ended first, if one did."""
        # Those that survived it only say that another one was gone.
        first = [rank for rank, why in ended.items() if _BY_PEER not in why]
        for rank in first or ended:
            why = ended[rank]
            raise RankError(f"rank {rank} of {self.plan.size} ended: {why}") from error


def _message(name: str, *args: Any, **named: Any) -> bytes:
    return pickle.dumps((name, args, named), pickle.HIGHEST_PROTOCOL)


def _replicas(nodes: Sequence[str]) -> int:
    """Return how many times ranks on these nodes hold the base: once on each of several nodes with
    equally many ranks, so that only gradients cross the network (HSDP), else once."""
    counts = Counter(nodes)
    each = {*counts.values()}
    return len(counts) if len(each) == 1 and each.pop() > 1 else 1


def custom_in_two_passes(
    learner: Any, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
) -> tuple[StepStats, dict[str, float]]:
    """Make ``Learner.forward_backward_custom`` of ``forward`` and ``forward_backward``."""
    loss, metrics, slopes = custom_slopes(rows, learner.forward(rows), function)
    weighted = [
        replace(
            row, advantages=[-slope for slope in own],
            extra={name: column for name, column in row.extra.items() if name == "temperature"},
        )
        for row, own in zip(rows, slopes, strict=True)
    ]  # fmt: skip
    stats = learner.forward_backward(weighted, "cross_entropy", None, 1.0)
    return replace(stats, loss=loss), metrics


class RankedLearner:
    """A learner whose computing calls are made by all ranks together.

    Args:
        base: of this process, the first rank.
        options: of each rank's ``Learner``.

    Raises:
        RankError: by a call during which a rank ended. Gradients that no ``optim_step`` has
            applied are lost then, as after any call of all ranks that fails; the next
            ``optim_step`` of their adapters says so.
    """

    def __init__(self, followers: Followers, base: BaseModel, options: Mapping[str, Any]) -> None:
        self._followers, self._options = followers, options
        self._sharded = followers.plan.shard
        self._structure: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._accumulated: set[str] = set()
        """Adapters with gradients that no step has applied."""
        self._lost: dict[str, Exception] = {}
        """Adapters whose gradients are gone, with the error of the call that cost them."""
        self._like_here = False
        """Whether the followers' adapters are those of this process."""
        if self._sharded and not followers.running:
            raise RankError(_GONE)
        followers.send("learn", options)  # to those of a sharded base, which has to be loaded first
        try:
            self._rank = Rank(learner_of(self._sharded)(base, **options))
        except Exception as error:
            followers.end(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name not in COMPUTED | STRUCTURE:
            return getattr(self._rank, name)

        return partial(self._together if name in COMPUTED else self._each, name)

    def _together(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            self._prepare()
            self._send(name, *args, **options)
            return getattr(self._rank, name)(*args, **options)
        except Exception as error:
            self._lost |= dict.fromkeys(self._accumulated, error)
            self._rank.discard_gradients()
            self._like_here = False
            self._followers.end(error)
            raise

    def _each(self, name: str, *args: Any, **options: Any) -> Any:
        found = getattr(self._rank, name)(*args, **options)
        self._send(name, *args, **options)
        if name in STRUCTURE:
            self._structure.append((name, args, options))
        return found

    def forward_backward(
        self, rows: Sequence[TrainingRow], *args: Any, backward: bool = True, **options: Any
    ) -> StepStats:
        stats = self._together("forward_backward", rows, *args, backward=backward, **options)
        if backward:
            self._accumulated |= {row.adapter for row in rows}
        return stats

    def optim_step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        """Step as ``Learner.optim_step``.

        Raises:
            RuntimeError: gradients of these adapters were lost; nothing is updated.
        """
        named = self._rank.adapters if adapters is None else adapters
        lost = [self._lost[name] for name in named if name in self._lost]
        if lost:
            self.discard_gradients(named)
            raise RuntimeError(
                f"nothing was updated: gradients were lost with a call that failed ({lost[0]})"
            ) from lost[0]
        self._accumulated -= {*named}  # if it fails, its own error says so
        return self._together("optim_step", adam, adapters)

    def remove_adapter(self, name: str) -> None:
        self._each("remove_adapter", name)
        self._forget([name])

    def discard_gradients(self, adapters: Collection[str] | None = None) -> None:
        self._each("discard_gradients", adapters)
        self._forget(adapters)

    def load_state_dict(
        self, state: Mapping[str, Tensor], adapters: Collection[str] | None = None
    ) -> None:
        self._each("load_state_dict", state, adapters)
        self._forget(adapters)

    def _forget(self, adapters: Collection[str] | None) -> None:
        for name in self._rank.adapters if adapters is None else adapters:
            self._lost.pop(name, None)
            self._accumulated.discard(name)

    def forward_backward_custom(
        self, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        """Add the gradient of any function of the log-probs, which is called in this process."""
        return custom_in_two_passes(self, rows, function)

    def close(self) -> None:
        """End the followers."""
        self._followers.end()

    def _prepare(self) -> None:
        """Start followers where there are none, and give them the adapters of this process."""
        if not self._followers.running:
            if self._sharded:
                raise RankError(_GONE)
            self._followers.start()
            self._followers.send("learn", self._options)
            for name, args, options in self._structure:
                self._send(name, *args, **options)
        if not self._like_here:
            self._send("load_state_dict", self._rank.state_dict())
            self._like_here = True

    def _send(self, name: str, *args: Any, **options: Any) -> None:
        self._followers.send("call", torch.get_num_threads(), name, *args, **options)
