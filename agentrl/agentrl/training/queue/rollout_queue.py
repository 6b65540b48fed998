"""Queue groups of rollouts, and hand the finished ones to each step, on time or ahead of time.

Decides which finished groups a step takes; ``curriculum`` decides which task comes next, and
``staleness`` how far rollouts run ahead of the updates. There is no thread: runners execute what is
queued while the trainer computes. A step takes finished groups in queue order, whole ones only; a
slow group is carried over to a later step.

``resample_zero_variance``: groups whose rewards are all equal do not fill the step. They keep their
verdict (zero_advantage), and groups of the next tasks take their place, for at most so many rounds:
dynamic sampling as in DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agentrl.config.commands import TrainConfig
from agentrl.training.queue.curriculum import Curriculum
from agentrl.training.queue.staleness import StalenessLimit
from agentrl_tracer.schemas import Json, NewRollout, Purpose, Rollout, SkipReason

if TYPE_CHECKING:
    from agentrl.scoring.scorer import Scorer
    from agentrl.training.session import OnProgress, Session


@dataclass(slots=True, eq=False)
class _Group:
    """A group that no step has taken: planned, queued, running or finished.

    The seeds of its rollouts depend on the first three fields alone.
    """

    planned_for: int  # step
    position: int  # within that step
    task: int  # index into the tasks
    ids: list[str] = field(default_factory=list[str])  # of its rollouts; empty: not queued yet
    version: int = -1  # of the adapters when it was queued: none of its tokens is older

    @property
    def group_id(self) -> str:
        return f"train-{self.planned_for}-{self.position}"


class StepRollouts(NamedTuple):
    """The rollouts of the groups that a step trains on."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    """How far the queue runs ahead; docs/metrics.md explains each."""


@dataclass(slots=True)
class RolloutQueue:
    """The groups of one run, step by step.

    Invariant: in the store, the rollouts of a queued group belong to the step that they were
    planned for, or to the current one if that is later.
    """

    session: Session
    config: TrainConfig
    task_ids: Sequence[str]
    """What ``_Group.task`` indexes."""
    curriculum: Curriculum
    """Which of them come next."""
    steps: int
    """Of the whole run."""
    staleness: StalenessLimit
    """How far groups may run ahead."""
    teaches: Callable[[int, list[Rollout]], bool]
    """Whether a finished group of a step carries any signal; called with
    ``resample_zero_variance``."""
    scorer: Scorer
    """Computes rewards of groups as soon as they have finished."""
    _tasks_drawn: int = 0
    _planned: int = 0  # steps whose groups have been planned
    _plans: list[_Group] = field(default_factory=list[_Group])  # not queued yet
    _groups: list[_Group] = field(default_factory=list[_Group])  # in queue order
    _handed_over: float | None = None

    def take(self, step: int, show: Callable[[str, int, int], None]) -> StepRollouts:
        """Wait for the groups of a step; those of the next steps are running on return.

        Args:
            show: called with what goes on, "rollouts" or "rewards", and how far it is.

        Raises:
            RunError: runners or gateway keep dying and no rollout finishes.
        """
        overlapped, how = 0.0, self.config.rollouts
        if self._handed_over is not None:
            ahead = itertools.chain.from_iterable(self._rollouts_of(self._groups))
            overlapped = seconds_of_running(ahead, self._handed_over)
        self.queue_up_to(step)
        # The batch of a run that was resumed may have been larger.
        known = [one.position for one in (*self._groups, *self._plans) if one.planned_for == step]
        free = max([how.batch_size - 1, *known]) + 1
        rollouts: list[Rollout] = []
        filled = carried_over = resampled = 0
        for rounds_left in range(how.resample_zero_variance, -1, -1):
            taken = self._wait_for(step, how.batch_size - filled, partial(show, "rollouts"))
            self.scorer.finish([group.ids for group in taken], partial(show, "rewards"))
            carried_over += sum(group.planned_for < step for group in taken)
            self._groups = [group for group in self._groups if group not in taken]
            self._move([group for group in taken if group.planned_for > step], step)
            for members in self._rollouts_of(taken):
                rollouts += members
                filled += not how.resample_zero_variance or self.teaches(step, members)
            missing = how.batch_size - filled
            if not missing or not rounds_left:
                break
            first = free + resampled
            self._queue(step, self._plan(step, range(first, first + missing)))
            resampled += missing
        # A resumed run repeats this step: what it did not take belongs to the next one.
        self._move([group for group in self._groups if group.planned_for <= step], step + 1)
        self._handed_over = time.time()
        metrics = {
            "groups/carried_over": carried_over,
            "groups/ahead": len(self._groups),
            "groups/resampled": resampled,
            "seconds/overlapped": overlapped,
        }
        return StepRollouts(rollouts, metrics)

    def under_way(self) -> tuple[int, int]:
        """Return the numbers of finished and of all rollouts of later steps."""
        ids = _ids(self._groups)
        first = min((group.planned_for for group in self._groups), default=0)
        return len(ids) - len(self._unfinished(first)), len(ids)

    # ---- interruptions

    def state(self) -> Json:
        """Return what a checkpoint keeps: how many tasks were drawn, their results, and the groups
        that no step has taken."""
        left = [*self._groups, *self._plans]
        return {
            "planned": self._planned,
            "tasks_drawn": self._tasks_drawn,
            "under_way": [[group.planned_for, group.position, group.task] for group in left],
            **self.curriculum.state(),
        }

    def restore(self, state: Json) -> None:
        """Continue from a checkpoint's state.

        Groups that were running are rolled out again, from the same seeds. With a smaller
        ``max_staleness`` or ``batch_size`` than before, some of them wait for their turn.
        """
        self._planned = state["planned"]
        self._tasks_drawn = state["tasks_drawn"]
        self.curriculum.restore(state)
        self._plans = [_Group(*fields) for fields in state["under_way"]]

    def close(self) -> None:
        """Cancel the groups that no step took, and judge their calls as left over."""
        if not self._groups:
            return
        self.session.store.cancel(self.session.run_id, "the run ended before a step took its group")
        self.session.skip_calls(_ids(self._groups), SkipReason.LEFT_OVER)
        self._groups = []

    # ---- queueing

    def queue_up_to(self, step: int) -> None:
        """Queue the groups of this step and of those that may run ahead.

        Never more than these steps take, or the last of them could not take its groups in time.
        Called before an evaluation, too: runners that it leaves idle begin the next step.
        """
        last = min(step + self.staleness.max_staleness, self.steps)
        while self._planned < last:
            self._planned += 1
            self._plans += self._plan(self._planned, range(self.config.rollouts.batch_size))
        room = max((last - step + 1) * self.config.rollouts.batch_size - len(self._groups), 0)
        now, self._plans = self._plans[:room], self._plans[room:]
        self._queue(step, now)

    def _plan(self, step: int, positions: Collection[int]) -> list[_Group]:
        drawn, self._tasks_drawn = self.curriculum.draw(self._tasks_drawn, len(positions))
        return [_Group(step, place, task) for place, task in zip(positions, drawn, strict=True)]

    def _queue(self, step: int, groups: Sequence[_Group]) -> None:
        """Queue groups during ``step``, hence with the adapter version of the step before."""
        size, seed = self.config.rollouts.group_size, self.config.run.seed
        new = [
            NewRollout(
                self.task_ids[group.task], group.group_id, Purpose.TRAIN,
                max(group.planned_for, step), index,
                seed=rollout_seed(seed, "train", group.planned_for, group.position, index),
            )
            for group in groups
            for index in range(size)
        ]  # fmt: skip
        ids = self.session.store.enqueue(self.session.run_id, new) if new else []
        for at, group in enumerate(groups):
            group.version, group.ids = step - 1, ids[at * size : (at + 1) * size]
        self._groups += groups

    # ---- taking

    def _wait_for(self, step: int, count: int, on_progress: OnProgress) -> list[_Group]:
        """Wait for ``count`` groups; return the first ones finished, fewer if there are no more."""
        count = min(count, len(self._groups))
        ids = _ids(self._groups)
        finished: list[_Group] = []

        def check() -> tuple[int, int, bool]:
            nonlocal finished
            unfinished = self._unfinished(step)
            finished = [g for g in self._groups if unfinished.isdisjoint(g.ids)]
            for group in finished:
                self.scorer.begin(group.ids)
            enough = len(finished) == len(self._groups)  # waiting longer changes nothing
            if not enough and len(finished) >= count:
                chosen = finished[:count]
                left = [group.version for group in self._groups if group not in chosen]
                enough = self.staleness.may_leave(step, left, self.config.rollouts.batch_size)
            total = count * self.config.rollouts.group_size
            return (total if enough else min(len(ids) - len(unfinished), total)), total, enough

        self.session.wait(check, on_progress)
        return finished[:count]

    def _unfinished(self, step: int) -> set[str]:
        """Return the rollouts of ``step`` and later that have not ended."""
        session = self.session
        return session.store.unfinished_ids(session.run_id, Purpose.TRAIN, since_step=step)

    def _rollouts_of(self, groups: Sequence[_Group]) -> list[list[Rollout]]:
        ids = _ids(groups)
        found = self.session.store.rollouts(self.session.run_id, ids=ids) if ids else []
        by_id = {rollout.id: rollout for rollout in found}
        return [[by_id[rollout_id] for rollout_id in group.ids] for group in groups]

    def _move(self, groups: Sequence[_Group], step: int) -> None:
        """Have the groups' rollouts belong to another step in the store."""
        if groups:
            self.session.store.move_to_step(_ids(groups), step)


def _ids(groups: Sequence[_Group]) -> list[str]:
    return [rollout_id for group in groups for rollout_id in group.ids]


def seconds_of_running(rollouts: Iterable[Rollout], since: float = -math.inf) -> float:
    """Return the seconds after ``since`` in which at least one of these rollouts ran."""
    now, covered = time.time(), 0.0
    times = [(r.started_at, r.ended_at or now) for r in rollouts if r.started_at is not None]
    for start, end in sorted(times):
        start = max(start, since)
        if end > start:
            covered += end - start
            since = end
    return covered


def rollout_seed(*parts: object) -> int:
    """Derive a seed of 63 bits, which fits a signed integer column, from ``parts`` alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
