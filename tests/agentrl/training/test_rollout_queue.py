"""Which groups a step gets, when they are queued, and what a resumed run takes up again.

The store is real; runners are played here: ``Hands`` ends rollouts in whatever order a test wants.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.training.evaluation import plan_evaluation
from agentrl.training.rollout_queue import (
    CheckProgress,
    RolloutQueue,
    StepRollouts,
    tasks_in_order,
)
from agentrl.training.session import Session
from agentrl.training.staleness import StalenessLimit
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose, Rollout, RolloutState
from agentrl_tracer.store import Store

TASKS, BATCH, GROUP = 10, 2, 3


class Hands:
    """Ends one group after the other, the ones that ``order`` prefers first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run_id = store.create_run("run", "train", {})
        self.task_ids = store.add_tasks(self.run_id, "train", [{"n": n} for n in range(TASKS)])
        self.order: Callable[[str], Any] = lambda group: 0
        self.stuck: set[str] = set()  # groups that do not get finished
        self.queued: list[NewRollout] = []
        self.waits = 0
        self.claims: dict[str, list[str]] = {}  # attempts by group

    def enqueue(self, new: Sequence[NewRollout]) -> list[str]:
        self.queued += new
        return self.store.enqueue(self.run_id, new)

    def wait(self, check: CheckProgress, on_progress: Callable[[int, int], None]) -> None:
        self.waits += 1
        while True:
            done, total, enough = check()
            on_progress(done, total)
            if enough:
                return
            self.work()

    def work(self) -> None:
        """One more group."""
        while claim := self.store.claim("hands", 60, self.run_id):
            [rollout] = self.store.rollouts(self.run_id, ids=[claim.rollout_id])
            self.claims.setdefault(rollout.group_id, []).append(claim.attempt_id)
        free = [group for group in self.claims if group not in self.stuck]
        assert free, f"nobody will ever finish {self.stuck}"
        for attempt in self.claims.pop(min(free, key=self.order)):
            self.store.end_attempt(attempt, AttemptState.SUCCEEDED)

    def groups(self, taken: StepRollouts) -> list[str]:
        names = [rollout.group_id for rollout in taken.rollouts]
        assert all(names.count(name) == GROUP for name in names), "groups are whole"
        assert all(r.state is RolloutState.SUCCEEDED for r in taken.rollouts)
        return list(dict.fromkeys(names))


@pytest.fixture
def hands(store: Store) -> Hands:
    return Hands(store)


def stream(hands: Hands, steps: int = 5, bound: int = 0, stale: Any = "correct", **options: Any):
    return RolloutQueue(
        hands, hands.task_ids, steps=steps, batch_size=BATCH, group_size=GROUP, seed=3,
        staleness=StalenessLimit(bound, stale), **options
    )  # fmt: skip


def nothing(done: int, total: int) -> None:
    assert 0 <= done <= total


def names(*places: tuple[int, int]) -> list[str]:
    return [f"train-{step}-{position}" for step, position in places]


def test_synchronously_a_step_is_its_own_groups(hands: Hands) -> None:
    source = stream(hands)
    for step in (1, 2, 3):
        taken = source.take(step, nothing)
        assert hands.groups(taken) == names((step, 0), (step, 1))
        assert len(hands.queued) == step * BATCH * GROUP  # and not one more
        assert (taken.ahead, taken.carried_over, taken.resampled, taken.overlapped) == (0, 0, 0, 0)
    tasks = [hands.task_ids.index(new.task_id) for new in hands.queued[::GROUP]]
    assert tasks == tasks_in_order(0, 6, TASKS, 3)
    assert len({new.seed for new in hands.queued}) == len(hands.queued)


def test_never_more_than_so_many_steps_ahead(hands: Hands) -> None:
    source = stream(hands, steps=5, bound=2)
    for step in range(1, 6):
        taken = source.take(step, nothing)
        assert len(hands.queued) == min(step + 2, 5) * BATCH * GROUP
        assert taken.ahead == (min(step + 2, 5) - step) * BATCH
        assert {r.step for r in taken.rollouts} == {step}
    assert source.under_way() == (0, 0)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_who_waits_is_never_older(hands: Hands, max_staleness: int, seed: int) -> None:
    """Whatever the order in which groups get finished, and after an interruption too."""
    luck = random.Random(seed)
    slowness = defaultdict(lambda: luck.random() - 1.5 * (luck.random() < 0.3))
    hands.order = lambda group: slowness[group]
    options = {"steps": 12, "bound": max_staleness, "stale": "wait"}
    source = stream(hands, **options)
    queued_at: dict[str, int] = {}
    for step in range(1, 13):
        if step == 6:
            hands.store.cancel(hands.run_id, "interrupted")
            hands.claims.clear()
            state = source.state()
            source = stream(hands, **options)
            source.restore(5, state)
            queued_at = {}
        known = len(hands.queued)
        taken = source.take(step, nothing)
        queued_at |= {new.group_id: step - 1 for new in hands.queued[known:]}
        ages = [step - 1 - queued_at[group] for group in hands.groups(taken)]
        assert len(ages) == BATCH
        assert max(ages) <= max_staleness
    assert source.under_way() == (0, 0)


@pytest.mark.parametrize(
    ("was", "now"), [((2, 2), (0, 2)), ((3, 2), (1, 2)), ((1, 2), (1, 1)), ((3, 3), (1, 2))]
)
def test_a_resumed_run_may_run_less_far_ahead(
    hands: Hands, was: tuple[int, int], now: tuple[int, int]
) -> None:
    """(max_staleness, batch_size): what was under way and is too much now waits for its turn."""

    def of(bounds: tuple[int, int]) -> RolloutQueue:
        return RolloutQueue(
            hands, hands.task_ids, steps=8, batch_size=bounds[1], group_size=GROUP, seed=3,
            staleness=StalenessLimit(bounds[0], "wait"),
        )  # fmt: skip

    source = of(was)
    source.take(1, nothing)
    state = source.state()
    hands.store.cancel(hands.run_id, "interrupted")
    hands.claims.clear()
    source = of(now)
    source.restore(1, state)
    known, queued_at, order = len(hands.queued), dict[str, int](), list[str]()
    for step in range(2, 9):
        taken = source.take(step, nothing)
        queued_at |= {new.group_id: step - 1 for new in hands.queued[known:]}
        known = len(hands.queued)
        order += hands.groups(taken)
        ages = [step - 1 - queued_at[group] for group in hands.groups(taken)]
        assert len(ages) == now[1]
        assert max(ages) <= now[0]
        if step == 2:  # another interruption forgets nothing
            assert len(source.state()["under_way"]) >= len(state["under_way"]) - now[1]
    wanted = [f"train-{s}-{p}" for s, p, _ in state["under_way"]]
    assert order[: len(wanted)] == wanted
    assert source.under_way() == (0, 0)


def test_a_slow_group_is_carried_over_whole(hands: Hands) -> None:
    hands.stuck = set(names((1, 1)))
    source = stream(hands, bound=1)
    first = source.take(1, nothing)
    assert hands.groups(first) == names((1, 0), (2, 0))  # the oldest that are finished
    assert first.carried_over == 0
    in_store = hands.store.rollouts(hands.run_id)
    assert {r.step for r in in_store if r.group_id == "train-2-0"} == {1}
    assert {r.step for r in in_store if r.group_id == "train-1-1"} == {2}
    hands.stuck = set()
    second = source.take(2, nothing)
    assert "train-1-1" in hands.groups(second)
    assert second.carried_over == 1
    assert second.overlapped > 0  # it ran while nobody waited
    rest = [hands.groups(source.take(step, nothing)) for step in (3, 4, 5)]
    everything = [
        g for groups in (hands.groups(first), hands.groups(second), *rest) for g in groups
    ]
    assert sorted(everything) == names(*((s, p) for s in range(1, 6) for p in range(BATCH)))


def test_a_step_waits_for_what_would_be_too_old(hands: Hands) -> None:
    """Version 0 queued two steps' groups; whatever the order, step 2 is the last to take them."""
    for rule, expected in ((True, names((1, 0), (1, 1))), (False, names((2, 0), (2, 1)))):
        hands.order = lambda group: -int(group.split("-")[1])  # the newest first
        source = stream(hands, bound=1, stale="wait" if rule else "correct")
        assert hands.groups(source.take(1, nothing)) == names((2, 0), (2, 1))
        found = hands.groups(source.take(2, nothing))
        assert found == (expected if rule else names((3, 0), (3, 1)))
        hands.store.cancel(hands.run_id, "next")
        hands.claims.clear()


def test_groups_that_teach_nothing_are_replaced(hands: Hands) -> None:
    dull = {"train-1-0", "train-1-1", "train-1-2"}

    def teaches(_step: int, group: list[Rollout]) -> bool:
        return group[0].group_id not in dull

    source = stream(hands, resample=3, teaches=teaches)
    taken = source.take(1, nothing)
    # Two, both dull; two more, one of them dull; one more.
    assert hands.groups(taken) == names(*((1, p) for p in range(5)))
    assert taken.resampled == 3
    assert hands.waits == 3
    assert hands.groups(source.take(2, nothing)) == names((2, 0), (2, 1))
    tasks = [hands.task_ids.index(new.task_id) for new in hands.queued[::GROUP]]
    assert tasks == tasks_in_order(0, 7, TASKS, 3)  # further tasks, none twice

    rounds = stream(hands, resample=1, teaches=lambda _step, _group: False)
    assert len(hands.groups(rounds.take(1, nothing))) == 2 * BATCH  # it gives up


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_stream_goes_on_from_its_state(hands: Hands, ahead: int) -> None:
    def teaches(_step: int, group: list[Rollout]) -> bool:
        return not group[0].group_id.endswith("1")

    options: dict[str, Any] = {"bound": ahead, "resample": 1, "teaches": teaches}
    whole = stream(hands, steps=4, **options)
    expected = [hands.groups(whole.take(step, nothing)) for step in range(1, 5)]
    seeds = {(new.group_id, new.index): (new.task_id, new.seed) for new in hands.queued}

    before = stream(hands, steps=4, **options)
    found = [hands.groups(before.take(step, nothing)) for step in (1, 2)]
    kept = before.state()
    before.take(3, nothing)  # and here it dies
    hands.store.cancel(hands.run_id, "the run was resumed", after_step=2)
    hands.claims.clear()
    after = stream(hands, steps=4, **options)
    after.restore(2, kept)
    found += [hands.groups(after.take(step, nothing)) for step in (3, 4)]
    assert found == expected
    again = {(new.group_id, new.index): (new.task_id, new.seed) for new in hands.queued}
    assert again == seeds
    assert stream(hands).state() == {"planned": 0, "tasks_drawn": 0, "under_way": []}


def test_a_checkpoint_without_a_state_is_of_a_synchronous_run(hands: Hands) -> None:
    source = stream(hands)
    source.restore(3, None)
    assert hands.groups(source.take(4, nothing)) == names((4, 0), (4, 1))
    tasks = [hands.task_ids.index(new.task_id) for new in hands.queued[::GROUP]]
    assert tasks == tasks_in_order(6, 2, TASKS, 3)


def test_what_nobody_took_is_cancelled(hands: Hands) -> None:
    source = stream(hands, bound=1)
    source.take(1, nothing)
    source.close()
    states = [r.state for r in hands.store.rollouts(hands.run_id, purpose=Purpose.TRAIN)]
    assert states.count(RolloutState.CANCELLED) == BATCH * GROUP
    assert source.under_way() == (0, 0)


class Played(Session):
    """A session whose one runner is played here."""

    def __init__(self, hands: Hands) -> None:
        self.store, self.run_id = hands.store, hands.run_id
        self.ran: list[str] = []

    def wait(self, check: CheckProgress, on_progress: Callable[[int, int], None]) -> None:
        while not check()[2]:
            claim = self.store.claim("hands", 60, self.run_id)
            assert claim is not None
            self.ran.append(claim.rollout_id)
            self.store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)


def test_an_evaluation_does_not_wait_for_the_next_steps_rollouts(hands: Hands) -> None:
    source = stream(hands, bound=2)
    source.take(1, nothing)
    ahead = hands.store.enqueue(hands.run_id, [replace(new) for new in hands.queued])
    session = Played(hands)
    done = session.execute(plan_evaluation(hands.task_ids, 1, 1, seed=3, temperature=0.0), nothing)
    assert session.ran == [rollout.id for rollout in done]
    assert {rollout.purpose for rollout in done} == {Purpose.EVAL}
    assert len(hands.store.unfinished_ids(ahead)) == len(ahead)
