"""Where the loop gets a step's rollouts from: finished groups, on time or ahead of time.

Knows which task comes when, how far rollouts may run ahead of the updates, and which finished
groups a step gets. Does not know how rollouts are executed (``Session`` does) nor what is learned
from them. There is no thread: runners are processes, and execute whatever is queued while the
trainer computes.

*Staleness* is counted in adapter versions, of which every step publishes one: a token that version
v sampled and step s trains on is s - 1 - v versions old. Synchronously it is 0. With a
``max_staleness`` of K the groups of K more steps are queued beside those of the step at hand, and
never more (AReaL's admission, arXiv:2505.24298, section 5.1: at version i, at most (i + K + 1)
batches have been started; the same as ``max_steps_off_policy`` of tinker-cookbook's AsyncConfig and
the lag of PipelineRL, arXiv:2509.19128). A step takes the groups that are finished, oldest first,
and whole ones only: a slow group is carried over to a later step. Its tokens would get older than K
there: by default (``TrainConfig.stale``: wait) the step waits for such a group instead, so that no
token is ever older than K. That costs no more than a synchronous run, which waits for every group.
Else the group is taken when it comes, and what is older is dropped, or trained on all the same.

``resample``: groups that taught nothing, all of whose rewards are equal, do not fill the step.
They keep their verdict (zero_advantage), and groups of the next tasks take their place, for so many
rounds: dynamic sampling as in DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.training.session import rollout_seed
from agentrl_tracer.schemas import Json, NewRollout, Purpose, Rollout
from agentrl_tracer.store import Store
from agentrl_trainer.data.skip_reasons import left_over_reasons

OnProgress = Callable[[int, int], None]
Look = Callable[[], tuple[int, int, bool]]
"""How far what is waited for has come: (finished, all, whether that is enough)."""


class Executor(Protocol):
    """What runs rollouts: a ``Session``."""

    run_id: str
    store: Store

    def enqueue(self, new: Sequence[NewRollout]) -> list[str]:
        """Queues rollouts for the runners; returns their ids."""
        ...

    def wait(self, look: Look, on_progress: OnProgress) -> None:
        """Returns when ``look`` says it is enough; raises RunError when it never will be."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A group to be rolled out; its rollouts' seeds depend on this alone."""

    step: int  # that it was planned for
    position: int  # there
    task: int  # index of its task

    @property
    def group_id(self) -> str:
        return f"train-{self.step}-{self.position}"


@dataclass(slots=True)
class _Group:
    """A ticket whose rollouts are queued, running or finished, and in no step yet."""

    ticket: Ticket
    ids: list[str]
    version: int  # of the adapters, when it was queued: none of its tokens is older
    step: int  # its rollouts' step in the store


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The groups that a step trains on."""

    rollouts: list[Rollout]
    carried_over: int  # groups that had been planned for an earlier step
    ahead: int  # groups queued or running for later steps
    resampled: int  # groups that taught nothing, and were replaced
    overlapped: float
    """Seconds, of those since the step before got its rollouts, in which rollouts ran all the same:
    while it learned, published and evaluated."""


class RolloutStream:
    """The finished groups of one run, step by step.

    Args:
        task_ids: what ``Ticket.task`` counts; each epoch goes through all of them, shuffled.
        max_staleness: K above; 0 is synchronous.
        never_older: wait for groups whose tokens would be older than that a step later.
        resample: most rounds of replacing what taught nothing.
        teaches: whether a finished group carries any signal. Asked only where ``resample``.
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
        max_staleness: int = 0,
        never_older: bool = False,
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
        self._max_staleness = max_staleness
        self._never_older = never_older
        self._resample = resample
        self._teaches = teaches
        self._tasks_drawn = 0
        self._planned = 0  # steps whose groups have been drawn
        self._drawn: list[Ticket] = []  # and not queued yet
        self._groups: list[_Group] = []  # in the order of their queue
        self._handed_over: float | None = None

    def take(self, step: int, on_progress: OnProgress) -> StepRollouts:
        """Waits for the groups of a step. Those of the next steps are under way when it returns.

        Raises:
            RunError: runners or gateway keep dying and nothing gets finished.
        """
        overlapped = self._overlapped()
        self._queue_up_to(step)
        rollouts: list[Rollout] = []
        filled = carried_over = resampled = 0
        for rounds_left in range(self._resample, -1, -1):
            taken = self._wait_for(step, self._batch_size - filled, on_progress)
            carried_over += sum(group.ticket.step < step for group in taken)
            for members in self._hand_over(step, taken):
                rollouts += members
                filled += not self._resample or self._teaches(step, members)
            missing = self._batch_size - filled
            if not missing or not rounds_left:
                break
            resampled += missing
            first = self._batch_size + resampled - missing
            self._queue(step, self._draw(step, range(first, first + missing)))
        self._carry_over(step)
        self._handed_over = time.time()
        return StepRollouts(rollouts, carried_over, len(self._groups), resampled, overlapped)

    def under_way(self) -> tuple[int, int]:
        """(finished, all) rollouts for later steps."""
        ids = [i for group in self._groups for i in group.ids]
        return len(ids) - self._store.unfinished(ids), len(ids)

    # ---- interruptions

    def state(self) -> Json:
        """What a checkpoint has to keep: which tasks have been drawn, and what no step has had."""
        tickets = [*(group.ticket for group in self._groups), *self._drawn]
        return {
            "planned": self._planned,
            "tasks_drawn": self._tasks_drawn,
            "under_way": [[t.step, t.position, t.task] for t in tickets],
        }

    def restore(self, step: int, state: Json | None) -> None:
        """Goes on after ``step``. Groups that were under way are rolled out anew, from the same
        seeds, by the adapter as it is now: what there was of them is not this history's. Where
        ``max_staleness`` or ``batch_size`` is smaller now, those beyond it come when it is their
        turn."""
        state = state or {"planned": step, "tasks_drawn": step * self._batch_size, "under_way": []}
        self._planned = state["planned"]
        self._tasks_drawn = state["tasks_drawn"]
        self._drawn = [Ticket(*fields) for fields in state["under_way"]]

    def close(self) -> None:
        """The run has ended: groups that no step took are cancelled, and their calls judged."""
        if not self._groups:
            return
        self._store.cancel(self._executor.run_id, "the run ended before a step took its group")
        ids = [i for group in self._groups for i in group.ids]
        calls = self._store.calls(rollout_ids=ids)
        self._store.settle(trained={}, skipped=left_over_reasons(calls))
        self._groups = []

    # ---- queueing

    def _queue_up_to(self, step: int) -> None:
        """The groups of this step and of the ``max_staleness`` after it, as far as not yet done;
        never more than these steps take, or the last of them could not take them in time."""
        last = min(step + self._max_staleness, self._steps)
        while self._planned < last:
            self._planned += 1
            self._drawn += self._draw(self._planned, range(self._batch_size))
        room = max((last - step + 1) * self._batch_size - len(self._groups), 0)
        now, self._drawn = self._drawn[:room], self._drawn[room:]
        self._queue(step, now)

    def _draw(self, step: int, positions: Collection[int]) -> list[Ticket]:
        first, count = self._tasks_drawn, len(positions)
        self._tasks_drawn += count
        drawn = tasks_in_order(first, count, len(self._task_ids), self._seed)
        return [Ticket(step, place, task) for place, task in zip(positions, drawn, strict=True)]

    def _queue(self, step: int, tickets: Sequence[Ticket]) -> None:
        """While ``step`` is being made, so by the version of the step before."""
        size = self._group_size
        new = [
            NewRollout(
                task_id=self._task_ids[ticket.task],
                group_id=ticket.group_id,
                purpose=Purpose.TRAIN,
                step=max(ticket.step, step),
                index=index,
                seed=rollout_seed(self._seed, "train", ticket.step, ticket.position, index),
                sampling={},
            )
            for ticket in tickets
            for index in range(size)
        ]
        ids = self._executor.enqueue(new) if new else []
        self._groups += [
            _Group(ticket, ids[i * size : (i + 1) * size], step - 1, max(ticket.step, step))
            for i, ticket in enumerate(tickets)
        ]

    # ---- taking

    def _wait_for(self, step: int, count: int, on_progress: OnProgress) -> list[_Group]:
        """The ``count`` first groups that are finished; fewer when there are no more."""
        count = min(count, len(self._groups))
        ids = [i for group in self._groups for i in group.ids]
        finished: list[_Group] = []

        def look() -> tuple[int, int, bool]:
            nonlocal finished
            unfinished = self._store.unfinished_ids(ids)
            finished = [g for g in self._groups if unfinished.isdisjoint(g.ids)]
            enough = (
                len(finished) >= count
                and (
                    len(finished) == len(self._groups)  # waiting longer changes nothing
                    or self._leaves_none_too_old(step, finished[:count])
                )
            )
            total = count * self._group_size
            done = sum(len(set(g.ids) - unfinished) for g in self._groups)
            return (total if enough else min(done, total)), total, enough

        self._executor.wait(look, on_progress)
        return finished[:count]

    def _leaves_none_too_old(self, step: int, chosen: Sequence[_Group]) -> bool:
        """Whether later steps, of a batch each, can take the other groups while they may.

        A group's last step is ``version + 1 + max_staleness``. Groups are queued, and so chosen, in
        the order of their last steps: nobody else could be chosen instead.
        """
        if not self._never_older:
            return True
        left = [
            group.version + 1 + self._max_staleness - step
            for group in self._groups
            if group not in chosen
        ]
        return all(
            sum(last <= later for last in left) <= later * self._batch_size
            for later in range(self._max_staleness + 1)
        )

    def _hand_over(self, step: int, taken: Sequence[_Group]) -> list[list[Rollout]]:
        """Out of the stream and into the step, in the store's books as well; by group."""
        self._move([group for group in taken if group.step != step], step)
        ids = [i for group in taken for i in group.ids]
        of_group: dict[str, list[Rollout]] = {group.ticket.group_id: [] for group in taken}
        for rollout in self._store.rollouts(self._executor.run_id, ids=ids):
            of_group[rollout.group_id].append(rollout)
        self._groups = [group for group in self._groups if group not in taken]
        return list(of_group.values())

    def _carry_over(self, step: int) -> None:
        """What this step did not take belongs to the next: a resumed run would repeat it."""
        self._move([group for group in self._groups if group.step <= step], step + 1)

    def _move(self, groups: Sequence[_Group], step: int) -> None:
        if groups:
            self._store.move_to_step([i for group in groups for i in group.ids], step)
        for group in groups:
            group.step = step

    def _overlapped(self) -> float:
        if self._handed_over is None or not self._groups:
            return 0.0
        ids = [i for group in self._groups for i in group.ids]
        now = time.time()
        rollouts = self._store.rollouts(self._executor.run_id, ids=ids)
        return _covered(_run_times(rollouts, now), self._handed_over, now)


def seconds_of_running(rollouts: Sequence[Rollout]) -> float:
    """The time in which at least one of these finished rollouts ran, whoever waited for it."""
    times = _run_times(rollouts, time.time())
    return _covered(times, -math.inf, math.inf)


def _run_times(rollouts: Sequence[Rollout], now: float) -> list[tuple[float, float]]:
    return [
        (rollout.started_at, rollout.ended_at or now)
        for rollout in rollouts
        if rollout.started_at is not None
    ]


def _covered(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of [start, end] lies in at least one of the intervals."""
    covered = 0.0
    for low, high in sorted(intervals):
        low, high = max(low, start), min(high, end)
        if high > low:
            covered += high - low
            start = high
    return covered


def tasks_in_order(first: int, count: int, tasks: int, seed: int) -> list[int]:
    """The tasks number ``first`` to ``first + count`` of the run: each epoch is a shuffle of its
    own. A function of its arguments alone, so a resumed run goes on where it was."""
    orders: dict[int, list[int]] = {}
    chosen: list[int] = []
    for position in range(first, first + count):
        epoch, place = divmod(position, tasks)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(tasks), tasks)
        chosen.append(orders[epoch][place])
    return chosen


def staleness_metrics(
    staleness: Sequence[int], *, max_staleness: int, taken: StepRollouts
) -> dict[str, Any]:
    """``staleness``: of each trained token, in versions."""
    count = max(len(staleness), 1)
    return {
        "staleness/mean": sum(staleness) / count,
        "staleness/max": max(staleness, default=0),
        # Older than the newest version, and older than max_staleness allows for.
        "staleness/share": sum(age > 0 for age in staleness) / count,
        "staleness/beyond": sum(age > max_staleness for age in staleness) / count,
        "groups/carried_over": taken.carried_over,
        "groups/ahead": taken.ahead,
        "groups/resampled": taken.resampled,
        "seconds/overlapped": taken.overlapped,
    }
