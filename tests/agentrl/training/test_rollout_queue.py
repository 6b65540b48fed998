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
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.settings import EvaluationSettings
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.rollout_queue import CheckProgress, RolloutQueue, StepRollouts, tasks_in_order
from agentrl.training.session import Session
from agentrl.training.staleness import StalenessLimit
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose, Rollout, RolloutState
from agentrl_tracer.store import Store

TASKS, BATCH, GROUP = 10, 2, 3


class Hands(Session):
    """A session whose runners are played here: ends one group after the other, the ones that
    ``order`` prefers first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run_id = store.create_run("run", "train", {})
        self.task_ids = store.add_tasks(self.run_id, "train", [{"n": n} for n in range(TASKS)])
        self.order: Callable[[str], Any] = lambda group: 0
        self.stuck: set[str] = set()  # groups that do not get finished
        self.queued: list[NewRollout] = []
        self.waits = 0
        self.claims: dict[str, list[str]] = {}  # attempts by group
        self.queued_at: dict[str, int] = {}  # version, by group
        self.taken: list[str] = []

    def enqueue(self, new: Sequence[NewRollout]) -> list[str]:
        self.queued += new
        return super().enqueue(new)

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
        assert free, f"{self.stuck} will never be finished"
        for attempt in self.claims.pop(min(free, key=self.order)):
            self.store.end_attempt(attempt, AttemptState.SUCCEEDED)

    def interrupt(self, **after: int) -> None:
        self.store.cancel(self.run_id, "interrupted", **after)
        self.claims.clear()

    def groups(self, taken: StepRollouts) -> list[str]:
        names = [rollout.group_id for rollout in taken.rollouts]
        assert all(names.count(name) == GROUP for name in names), "groups are whole"
        assert all(r.state is RolloutState.SUCCEEDED for r in taken.rollouts)
        return list(dict.fromkeys(names))

    def tasks(self) -> list[int]:
        return [self.task_ids.index(new.task_id) for new in self.queued[::GROUP]]

    def ages(self, step: int, source: RolloutQueue) -> list[int]:
        """Take a step; return how many versions ago its groups were queued."""
        known = len(self.queued)
        self.taken = self.groups(source.take(step, nothing))
        self.queued_at |= {new.group_id: step - 1 for new in self.queued[known:]}
        return [step - 1 - self.queued_at[group] for group in self.taken]


@pytest.fixture
def hands(store: Store) -> Hands:
    return Hands(store)


def stream(
    hands: Hands, steps: int = 5, bound: int = 0, stale: Any = "correct",
    teaches: Any = lambda _step, _group: True, **settings: Any,
) -> RolloutQueue:  # fmt: skip
    given = {"batch_size": BATCH, "group_size": GROUP, "seed": 3} | settings
    config = TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl", **given))
    staleness = StalenessLimit(bound, stale)
    return RolloutQueue(
        hands, config, hands.task_ids, steps=steps, staleness=staleness, teaches=teaches
    )


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
    assert hands.tasks() == tasks_in_order(0, 6, TASKS, 3)
    assert len({new.seed for new in hands.queued}) == len(hands.queued)


def test_never_more_than_so_many_steps_ahead(hands: Hands) -> None:
    source = stream(hands, bound=2)
    for step in range(1, 6):
        taken = source.take(step, nothing)
        assert len(hands.queued) == min(step + 2, 5) * BATCH * GROUP
        assert taken.ahead == (min(step + 2, 5) - step) * BATCH
        assert {r.step for r in taken.rollouts} == {step}
    assert source.under_way() == (0, 0)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_groups_that_are_waited_for_are_never_older(
    hands: Hands, max_staleness: int, seed: int
) -> None:
    """Whatever the order in which groups get finished, and after an interruption too."""
    luck = random.Random(seed)
    slowness = defaultdict(lambda: luck.random() - 1.5 * (luck.random() < 0.3))
    hands.order = lambda group: slowness[group]
    options = {"steps": 12, "bound": max_staleness, "stale": "wait"}
    source, hands.queued_at = stream(hands, **options), {}
    for step in range(1, 13):
        if step == 6:
            hands.interrupt()
            state = source.state()
            source, hands.queued_at = stream(hands, **options), {}
            source.restore(state)
        ages = hands.ages(step, source)
        assert len(ages) == BATCH
        assert max(ages) <= max_staleness
    assert source.under_way() == (0, 0)


@pytest.mark.parametrize(
    ("was", "now"), [((2, 2), (0, 2)), ((3, 2), (1, 2)), ((1, 2), (1, 1)), ((3, 3), (1, 2))]
)
def test_a_resumed_run_may_run_less_far_ahead(
    hands: Hands, was: tuple[int, int], now: tuple[int, int]
) -> None:
    """(max_staleness, batch_size): what was running and is too much now waits for its turn."""

    def of(bounds: tuple[int, int]) -> RolloutQueue:
        return stream(hands, steps=8, bound=bounds[0], stale="wait", batch_size=bounds[1])

    source = of(was)
    source.take(1, nothing)
    state = source.state()
    hands.interrupt()
    source, hands.queued_at, order = of(now), {}, list[str]()
    source.restore(state)
    for step in range(2, 9):
        ages = hands.ages(step, source)
        order += hands.taken
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
    assert second.overlapped > 0  # it ran while no step waited
    found = [*hands.groups(first), *hands.groups(second)]
    for step in (3, 4, 5):
        found += hands.groups(source.take(step, nothing))
    assert sorted(found) == names(*((s, p) for s in range(1, 6) for p in range(BATCH)))


@pytest.mark.parametrize(
    ("stale", "second"), [("wait", names((1, 0), (1, 1))), ("correct", names((3, 0), (3, 1)))]
)
def test_a_step_waits_for_what_would_be_too_old(
    hands: Hands, stale: str, second: list[str]
) -> None:
    """Version 0 queued two steps' groups; whatever the order, step 2 is the last to take them."""
    hands.order = lambda group: -int(group.split("-")[1])  # the newest first
    source = stream(hands, bound=1, stale=stale)
    assert hands.groups(source.take(1, nothing)) == names((2, 0), (2, 1))
    assert hands.groups(source.take(2, nothing)) == second


def test_groups_that_teach_nothing_are_replaced(hands: Hands) -> None:
    dull = {"train-1-0", "train-1-1", "train-1-2"}

    def teaches(_step: int, group: list[Rollout]) -> bool:
        return group[0].group_id not in dull

    source = stream(hands, resample_zero_variance=3, teaches=teaches)
    taken = source.take(1, nothing)
    # Two, both dull; two more, one of them dull; one more.
    assert hands.groups(taken) == names(*((1, p) for p in range(5)))
    assert taken.resampled == 3
    assert hands.waits == 3
    assert hands.groups(source.take(2, nothing)) == names((2, 0), (2, 1))
    assert hands.tasks() == tasks_in_order(0, 7, TASKS, 3)  # further tasks, none twice

    rounds = stream(hands, resample_zero_variance=1, teaches=lambda _step, _group: False)
    assert len(hands.groups(rounds.take(1, nothing))) == 2 * BATCH  # it gives up


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_stream_continues_from_its_state(hands: Hands, ahead: int) -> None:
    def teaches(_step: int, group: list[Rollout]) -> bool:
        return not group[0].group_id.endswith("1")

    def taken(source: RolloutQueue, *steps: int) -> list[list[str]]:
        return [hands.groups(source.take(step, nothing)) for step in steps]

    options: dict[str, Any] = {"bound": ahead, "resample_zero_variance": 1, "teaches": teaches}
    expected = taken(stream(hands, steps=4, **options), 1, 2, 3, 4)
    seeds = {(new.group_id, new.index): (new.task_id, new.seed) for new in hands.queued}

    before = stream(hands, steps=4, **options)
    found = taken(before, 1, 2)
    kept = before.state()
    before.take(3, nothing)  # and here it dies
    hands.interrupt(after_step=2)
    after = stream(hands, steps=4, **options)
    after.restore(kept)
    assert found + taken(after, 3, 4) == expected
    again = {(new.group_id, new.index): (new.task_id, new.seed) for new in hands.queued}
    assert again == seeds
    assert stream(hands).state() == {"planned": 0, "tasks_drawn": 0, "under_way": []}


def test_groups_that_no_step_took_are_canceled(hands: Hands) -> None:
    source = stream(hands, bound=1)
    source.take(1, nothing)
    source.close()
    states = [r.state for r in hands.store.rollouts(hands.run_id, purpose=Purpose.TRAIN)]
    assert states.count(RolloutState.CANCELLED) == BATCH * GROUP
    assert source.under_way() == (0, 0)


def test_an_evaluation_does_not_wait_for_the_next_steps_rollouts(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stream(hands, bound=2)
    source.take(1, nothing)
    ahead = hands.store.enqueue(hands.run_id, [replace(new) for new in hands.queued])
    ran: list[str] = []

    def one_runner(check: CheckProgress, _on_progress: Any) -> None:
        while not check()[2]:
            claim = hands.store.claim("hands", 60, hands.run_id)
            assert claim is not None
            ran.append(claim.rollout_id)
            hands.store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)

    monkeypatch.setattr(hands, "wait", one_runner)
    plan = plan_evaluation(hands.task_ids, 1, EvaluationSettings(), seed=3)
    done = hands.execute(plan, nothing)
    assert ran == [rollout.id for rollout in done]
    assert {rollout.purpose for rollout in done} == {Purpose.EVAL}
    assert len(hands.store.unfinished_ids(ahead)) == len(ahead)
