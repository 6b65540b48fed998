"""A learner that is one of several ranks: each computes some of a step's rows.

Every rank has all adapters, and is given all rows, so each knows its share without asking.
Gradients are added up once for each optimizer step, which all ranks make alike: their weights stay
equal bit for bit. Collectives are torch.distributed's, over the default group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl_trainer.data.packing import count_tokens, split_rows
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.sharded import ShardedLearner
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams, LossConfig
from agentrl_trainer.learner.optimizers import VALUE
from agentrl_trainer.learner.step_stats import OptimStats, StepStats, merged

T = TypeVar("T")


class Rank:
    """This process's learner among those of the default process group.

    Its methods are collective: all ranks call them in the same order, with equal arguments. What
    they return is the same on all ranks, and what one learner would return for all rows.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._in_step = learner.in_step if isinstance(learner, ShardedLearner) else _freely
        self.sent = 0
        """Bytes of gradients that this rank has added to the others' so far."""

    # ---- rows, each of which is computed by one rank

    def forward(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        return self._by_row(rows, self.learner.forward)

    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        return self._by_row(rows, self.learner.values)

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        if not any("temperature" in row.extra for row in rows):
            return list(rows)
        return self._by_row(rows, self.learner.with_temperature)

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        return self._by_row(rows, self.learner.with_proximal)

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        return self._by_row(rows, lambda own: self.learner.with_reference(own, adapter))

    def finite_rows(
        self, rows: Sequence[TrainingRow], loss: str, loss_config: LossConfig | None = None
    ) -> list[int]:
        def marks(own: Sequence[TrainingRow]) -> list[bool]:
            finite = set(self.learner.finite_rows(own, loss, loss_config))
            return [index in finite for index in range(len(own))]

        found = self._by_row(rows, marks, backward=True)
        return [index for index, finite in enumerate(found) if finite]

    def _by_row(
        self,
        rows: Sequence[TrainingRow],
        compute: Callable[[list[TrainingRow]], list[T]],
        *,
        backward: bool = False,
    ) -> list[T]:
        """Gather the results of all rows, in their order."""
        shares = split_rows(rows, dist.get_world_size())
        with self._in_step(backward=backward):
            own = compute([rows[index] for index in shares[dist.get_rank()]])
        by_index: dict[int, T] = {}
        for share, found in zip(shares, gathered(own), strict=True):
            by_index |= zip(share, found, strict=True)
        return [by_index[index] for index in range(len(rows))]

    # ---- learning

    def forward_backward(
        self,
        rows: Sequence[TrainingRow],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        normalize_by: float | None = None,
        logprobs_into: list[list[float]] | None = None,
        *,
        backward: bool = True,
    ) -> StepStats:
        shares = split_rows(rows, dist.get_world_size())
        own = shares[dist.get_rank()]
        normalize_by = normalize_by or max(sum(row.trained for row in rows), 1)
        filled = [[0.0] * len(rows[index].tokens) for index in own] if logprobs_into else None
        with self._in_step(backward=backward):
            stats = self.learner.forward_backward(
                [rows[index] for index in own], loss, loss_config, normalize_by, filled,
                backward=backward,
            )  # fmt: skip
        parts = gathered((stats, filled, sorted(self.learner.non_finite)))
        for share, (_, logprobs, non_finite) in zip(shares, parts, strict=True):
            self.learner.non_finite |= set(non_finite)
            for index, found in zip(share, logprobs or (), strict=logprobs is not None):
                logprobs_into[index][:] = found  # type: ignore[index] - it is there with logprobs
        whole = merged([stats for stats, _, _ in parts])
        return replace(whole, tokens_unique=count_tokens(rows).unique)

    def optim_step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        names = self.learner.adapters if adapters is None else adapters
        for name, parameters in self.learner.parameters.items():
            if name.removeprefix(VALUE) in names:
                self._add_up(list(parameters.values()))
        stats = self.learner.optim_step(adam, adapters)
        every = [one.data for own in self.learner.parameters.values() for one in own.values()]
        bits = int(sum(one.view(torch.int32).sum() for one in every))
        if len({repr(other) for other in gathered((stats, bits))}) > 1:  # NaN are equal here
            raise RuntimeError("the ranks' weights are no longer equal")
        return stats

    def _add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks, in one tensor; without any, they stay None."""
        if not any(gathered(any(one.grad is not None for one in parameters))):
            return
        whole = torch.cat([_gradient(one).flatten() for one in parameters])
        dist.all_reduce(whole)
        self.sent += whole.numel() * whole.element_size()
        for one, part in zip(
            parameters, whole.split([one.numel() for one in parameters]), strict=True
        ):
            one.grad = part.view_as(one)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)


@contextlib.contextmanager
def _freely(*, backward: bool) -> Iterator[None]:
    """A rank with the whole base model makes its passes when it likes."""
    yield


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, by rank. They are pickled."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
