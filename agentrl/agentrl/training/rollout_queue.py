"""Queue groups of rollouts, and hand the finished ones to each step, on time or ahead of time.

Decides which task comes when and which finished groups a step takes; ``staleness`` decides how far
rollouts run ahead of the updates. There is no thread: runners execute what is queued while the
trainer computes. A step takes finished groups in queue order, whole ones only; a slow group is
carried over to a later step.

``resample``: groups whose rewards are all equal do not fill the step. They keep their verdict
(zero_advantage), and groups of the next tasks take their place, for at most so many rounds: dynamic
sampling as in DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.training.staleness import StalenessLimit
from agentrl_tracer.schemas import Json, NewRollout, Purpose, Rollout
from agentrl_tracer.store import Store
from agentrl_trainer.data.skip_reasons import left_over_reasons

OnProgress = Callable[[int, int], None]
"""Called with the numbers of finished and of all rollouts."""
CheckProgress = Callable[[], tuple[int, int, bool]]
"""Returns the numbers of finished and of all rollouts, and whether that is enough."""


class Executor(Protocol):
    """Runs rollouts; ``Session`` does."""

    run_id: str
    store: Store

    def enqueue(self, new: Sequence[NewRollout]) -> list[str]:
        """Queue rollouts for the runners; return their ids."""
        ...

    def wait(self, check: CheckProgress, on_progress: OnProgress) -> None:
        """Return when ``check`` says enough; raise RunError when it never will."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group to roll out; the seeds of its rollouts depend on these fields alone."""

    step: int  # that it was planned for
    position: int  # within that step
    task: int  # index into the tasks

    @property
    def group_id(self) -> str:
        return f"train-{self.step}-{self.position}"


@dataclass(slots=True)
class _QueuedGroup:
    """A group whose rollouts are queued, running or finished, and which no step has taken."""

    plan: PlannedGroup
    ids: list[str]
    version: int  # of the adapters when it was queued: none of its tokens is older
    step: int  # of its rollouts in the store


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The groups that a step trains on."""

    rollouts: list[Rollout]
    carried_over: int = 0  # groups planned for an earlier step
    ahead: int = 0  # groups queued or running for later steps
    resampled: int = 0  # groups with equal rewards that were replaced
    overlapped: float = 0.0
    """Seconds since the last step got its rollouts in which rollouts ran beside the learning."""

    def metrics(self) -> dict[str, float]:
        return {
            "groups/carried_over": self.carried_over,
            "groups/ahead": self.ahead,
            "groups/resampled": self.resampled,
            "seconds/overlapped": self.overlapped,
        }


class RolloutQueue:
    """The groups of one run, step by step.

    Args:
        task_ids: what ``PlannedGroup.task`` indexes; each epoch goes through all, shuffled.
        staleness: how far groups may run ahead.
        resample: most rounds of replacing groups that teach nothing.
        teaches: whether a finished group of a step carries any signal; called with ``resample``.
    """

    def __init__(
        self,
        executor: Executor,
        task_ids: Sequence[str],
        *,
        steps: int,
        batch_size: int,
        group_size: int,
        seed: int,
        staleness: StalenessLimit,
        resample: int = 0,
        teaches: Callable[[int, list[Rollout]], bool] = lambda _step, _rollouts: True,
    ) -> None:
        self._executor = executor
        self._store = executor.store
        self._task_ids = task_ids
        self._steps = steps
        self._batch_size = batch_size
        self._group_size = group_size
        self._seed = seed
        self._staleness = staleness
        self._resample = resample
        self._teaches = teaches
        self._tasks_drawn = 0
        self._planned = 0  # steps whose groups have been planned
        self._plans: list[PlannedGroup] = []  # not queued yet
        self._groups: list[_QueuedGroup] = []  # in queue order
        self._handed_over: float | None = None

    def take(self, step: int, on_progress: OnProgress) -> StepRollouts:
        """Wait for the groups of a step; those of the next steps are under way on return.

        Raises:
            RunError: runners or gateway keep dying and no rollout finishes.
        """
        overlapped = self._overlapped()
        self._queue_up_to(step)
        rollouts: list[Rollout] = []
        filled = carried_over = resampled = 0
        for rounds_left in range(self._resample, -1, -1):
            taken = self._wait_for(step, self._batch_size - filled, on_progress)
            carried_over += sum(group.plan.step < step for group in taken)
            for members in self._hand_over(step, taken):
                rollouts += members
                filled += not self._resample or self._teaches(step, members)
            missing = self._batch_size - filled
            if not missing or not rounds_left:
                break
            resampled += missing
            first = self._batch_size + resampled - missing
            self._queue(step, self._plan(step, range(first, first + missing)))
        # A resumed run repeats this step: what it did not take belongs to the next one.
        self._move([group for group in self._groups if group.step <= step], step + 1)
        self._handed_over = time.time()
        return StepRollouts(rollouts, carried_over, len(self._groups), resampled, overlapped)

    def under_way(self) -> tuple[int, int]:
        """Return the numbers of finished and of all rollouts of later steps."""
        ids = _ids(self._groups)
        return len(ids) - len(self._store.unfinished_ids(ids)), len(ids)

    # ---- interruptions

    def state(self) -> Json:
        """Return what a checkpoint keeps: how many tasks were drawn, and groups not yet taken."""
        plans = [*(group.plan for group in self._groups), *self._plans]
        return {
            "planned": self._planned,
            "tasks_drawn": self._tasks_drawn,
            "under_way": [[plan.step, plan.position, plan.task] for plan in plans],
        }

    def restore(self, step: int, state: Json | None) -> None:
        """Continue after ``step``.

        Groups that were under way are rolled out again, from the same seeds. With a smaller
        ``max_staleness`` or ``batch_size`` than before, some of them wait for their turn.
        """
        state = state or {"planned": step, "tasks_drawn": step * self._batch_size, "under_way": []}
        self._planned = state["planned"]
        self._tasks_drawn = state["tasks_drawn"]
        self._plans = [PlannedGroup(*fields) for fields in state["under_way"]]

    def close(self) -> None:
        """Cancel the groups that no step took, and judge their calls as left over."""
        if not self._groups:
            return
        self._store.cancel(self._executor.run_id, "the run ended before a step took its group")
        calls = self._store.calls(rollout_ids=_ids(self._groups))
        self._store.settle(trained={}, skipped=left_over_reasons(calls))
        self._groups = []

    # ---- queueing

    def _queue_up_to(self, step: int) -> None:
        """Queue the groups of this step and of those that may run ahead.

        Never more than these steps take, or the last of them could not take its groups in time.
        """
        last = self._staleness.last_queued_step(step, self._steps)
        while self._planned < last:
            self._planned += 1
            self._plans += self._plan(self._planned, range(self._batch_size))
        room = max((last - step + 1) * self._batch_size - len(self._groups), 0)
        now, self._plans = self._plans[:room], self._plans[room:]
        self._queue(step, now)

    def _plan(self, step: int, positions: Collection[int]) -> list[PlannedGroup]:
        first, count = self._tasks_drawn, len(positions)
        self._tasks_drawn += count
        drawn = tasks_in_order(first, count, len(self._task_ids), self._seed)
        return [
            PlannedGroup(step, place, task) for place, task in zip(positions, drawn, strict=True)
        ]

    def _queue(self, step: int, plans: Sequence[PlannedGroup]) -> None:
        """Queue groups during ``step``, hence with the adapter version of the step before."""
        size = self._group_size
        new = [
            NewRollout(
                task_id=self._task_ids[plan.task],
                group_id=plan.group_id,
                purpose=Purpose.TRAIN,
                step=max(plan.step, step),
                index=index,
                seed=rollout_seed(self._seed, "train", plan.step, plan.position, index),
                sampling={},
            )
            for plan in plans
            for index in range(size)
        ]
        ids = self._executor.enqueue(new) if new else []
        self._groups += [
            _QueuedGroup(plan, ids[i * size : (i + 1) * size], step - 1, max(plan.step, step))
            for i, plan in enumerate(plans)
        ]

    # ---- taking

    def _wait_for(self, step: int, count: int, on_progress: OnProgress) -> list[_QueuedGroup]:
        """Wait for ``count`` groups; return the first ones finished, fewer if there are no more."""
        count = min(count, len(self._groups))
        ids = _ids(self._groups)
        finished: list[_QueuedGroup] = []

        def check() -> tuple[int, int, bool]:
            nonlocal finished
            unfinished = self._store.unfinished_ids(ids)
            finished = [g for g in self._groups if unfinished.isdisjoint(g.ids)]
            enough = (
                len(finished) >= count
                and (
                    len(finished) == len(self._groups)  # waiting longer changes nothing
                    or self._may_take(step, finished[:count])
                )
            )
            total = count * self._group_size
            done = sum(len(set(g.ids) - unfinished) for g in self._groups)
            return (total if enough else min(done, total)), total, enough

        self._executor.wait(check, on_progress)
        return finished[:count]

    def _may_take(self, step: int, chosen: Sequence[_QueuedGroup]) -> bool:
        left = [group.version for group in self._groups if group not in chosen]
        return self._staleness.may_leave(step, left, self._batch_size)

    def _hand_over(self, step: int, taken: Sequence[_QueuedGroup]) -> list[list[Rollout]]:
        """Move groups out of the queue into the step, also in the store; return their rollouts."""
        self._move([group for group in taken if group.step != step], step)
        of_group: dict[str, list[Rollout]] = {group.plan.group_id: [] for group in taken}
        for rollout in self._store.rollouts(self._executor.run_id, ids=_ids(taken)):
            of_group[rollout.group_id].append(rollout)
        self._groups = [group for group in self._groups if group not in taken]
        return list(of_group.values())

    def _move(self, groups: Sequence[_QueuedGroup], step: int) -> None:
        if groups:
            self._store.move_to_step(_ids(groups), step)
        for group in groups:
            group.step = step

    def _overlapped(self) -> float:
        if self._handed_over is None or not self._groups:
            return 0.0
        now = time.time()
        rollouts = self._store.rollouts(self._executor.run_id, ids=_ids(self._groups))
        return _covered(_run_times(rollouts, now), self._handed_over, now)


def _ids(groups: Sequence[_QueuedGroup]) -> list[str]:
    return [rollout_id for group in groups for rollout_id in group.ids]


def seconds_of_running(rollouts: Sequence[Rollout]) -> float:
    """Return the seconds in which at least one of these finished rollouts ran."""
    times = _run_times(rollouts, time.time())
    return _covered(times, -math.inf, math.inf)


def _run_times(rollouts: Sequence[Rollout], now: float) -> list[tuple[float, float]]:
    return [
        (rollout.started_at, rollout.ended_at or now)
        for rollout in rollouts
        if rollout.started_at is not None
    ]


def _covered(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return how much of [start, end] lies in at least one of the intervals."""
    covered = 0.0
    for low, high in sorted(intervals):
        low, high = max(low, start), min(high, end)
        if high > low:
            covered += high - low
            start = high
    return covered


def tasks_in_order(first: int, count: int, tasks: int, seed: int) -> list[int]:
    """Return the indices of the run's tasks ``first`` to ``first + count``.

    Each epoch is a shuffle of its own. The result depends on the arguments alone, so a resumed run
    continues where it was.
    """
    orders: dict[int, list[int]] = {}
    chosen: list[int] = []
    for position in range(first, first + count):
        epoch, place = divmod(position, tasks)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(tasks), tasks)
        chosen.append(orders[epoch][place])
    return chosen


def rollout_seed(*parts: object) -> int:
    """Derive a seed of 63 bits, which fits a signed integer column, from ``parts`` alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
