"""Which groups a step gets, when they are queued, and what a resumed run takes up again.

The store is real; runners are played here: ``Hands`` ends rollouts in whatever order a test wants.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.settings.evaluation import EvaluationSettings
from agentrl.scoring.scorer import Scorer
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.queue.curriculum import Curriculum, tasks_in_order
from agentrl.training.queue.rollout_queue import RolloutQueue
from agentrl.training.queue.staleness import StalenessLimit
from agentrl.training.session import CheckProgress, Session
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose, Rollout, RolloutState
from agentrl_tracer.store import Store

TASKS, BATCH, GROUP = 10, 2, 3


class Hands(Session):
    """A session whose runners are played here: ends one group after the other, the ones that
    ``order`` prefers first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        store.enqueue = self._enqueue  # type: ignore[method-assign]
        self.run_id = store.create_run("run", "train", {})
        self.task_ids = store.add_tasks(self.run_id, "train", [{"n": n} for n in range(TASKS)])
        self.order: Callable[[str], Any] = lambda group: 0
        self.stuck: set[str] = set()  # groups that do not get finished
        self.queued: list[NewRollout] = []
        self.waits = 0
        self.claims: dict[str, list[str]] = {}  # attempts by group

    def _enqueue(self, run_id: str, new: Sequence[NewRollout], **how: Any) -> list[str]:
        self.queued += new
        return Store.enqueue(self.store, run_id, new, **how)

    def wait(self, check: CheckProgress, on_progress: Callable[[int, int], None]) -> None:
        self.waits += 1
        while True:
            done, total, enough = check()
            on_progress(done, total)
            if enough:
                return
            self.work()

    def work(self) -> None:
        """End one more group."""
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

    def tasks(self) -> list[int]:
        return [self.task_ids.index(new.task_id) for new in self.queued[::GROUP]]


class Queue(RolloutQueue):
    """A queue that remembers what its last step took: the groups, and metrics."""

    group_ids: list[str]
    ages: list[int]
    """How many versions ago the groups were queued."""
    metrics: dict[str, float]
    queued_at: dict[str, int]

    def step(self, step: int) -> list[str]:
        """Take a step's groups, which are whole; return their ids."""
        hands: Any = self.session
        known = len(hands.queued)
        rollouts, self.metrics = self.take(step, nothing)
        assert {(r.state, r.step) for r in rollouts} <= {(RolloutState.SUCCEEDED, step)}
        names = [rollout.group_id for rollout in rollouts]
        assert all(names.count(name) == GROUP for name in names)
        self.queued_at |= {new.group_id: step - 1 for new in hands.queued[known:]}
        self.group_ids = list(dict.fromkeys(names))
        self.ages = [step - 1 - self.queued_at[group] for group in self.group_ids]
        return self.group_ids


@pytest.fixture
def hands(store: Store) -> Hands:
    return Hands(store)


def stream(
    hands: Hands, steps: int = 5, bound: int = 0, stale: Any = "correct",
    teaches: Any = lambda _step, _group: True, state: Any = None, **settings: Any,
) -> Queue:  # fmt: skip
    given = {"batch_size": BATCH, "group_size": GROUP, "seed": 3} | settings
    config = TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl", **given))
    limit = StalenessLimit(bound, stale)
    tasks = Curriculum(config, [{}] * len(hands.task_ids))
    unscored = Scorer((), Any)  # pyright: ignore[reportArgumentType]
    queue = Queue(
        hands, config, hands.task_ids, tasks, steps=steps, staleness=limit, teaches=teaches,
        scorer=unscored,
    )  # fmt: skip
    queue.queued_at = {}
    if state is not None:
        queue.restore(state)
    return queue


def nothing(*progress: Any) -> None:
    done, total = progress[-2:]
    assert 0 <= done <= total


def names(*places: tuple[int, int]) -> list[str]:
    return [f"train-{step}-{position}" for step, position in places]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_step_is_its_own_groups_and_never_more_than_the_bound_ahead(
    hands: Hands, bound: int
) -> None:
    source = stream(hands, bound=bound)
    for step in range(1, 6):
        assert source.step(step) == names((step, 0), (step, 1))
        last = min(step + bound, 5)
        assert len(hands.queued) == last * BATCH * GROUP  # and not one more
        assert source.metrics["groups/ahead"] == (last - step) * BATCH
        assert source.metrics["groups/carried_over"] == source.metrics["groups/resampled"] == 0
        assert bound or source.metrics["seconds/overlapped"] == 0
    assert source.under_way() == (0, 0)
    assert hands.tasks() == tasks_in_order(0, 10, TASKS, 3)
    assert len({new.seed for new in hands.queued}) == len(hands.queued)


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
    source = stream(hands, **options)
    for step in range(1, 13):
        if step == 6:
            hands.interrupt()
            source = stream(hands, state=source.state(), **options)
        assert len(source.step(step)) == BATCH
        assert max(source.ages) <= max_staleness
    assert source.under_way() == (0, 0)


@pytest.mark.parametrize(
    ("was", "now"), [((2, 2), (0, 2)), ((3, 2), (1, 2)), ((1, 2), (1, 1)), ((3, 3), (1, 2))]
)
def test_a_resumed_run_may_run_less_far_ahead(
    hands: Hands, was: tuple[int, int], now: tuple[int, int]
) -> None:
    """(max_staleness, batch_size): what was running and is too much now waits for its turn."""
    source = stream(hands, steps=8, bound=was[0], stale="wait", batch_size=was[1])
    source.step(1)
    state = source.state()
    hands.interrupt()
    source = stream(hands, steps=8, bound=now[0], stale="wait", batch_size=now[1], state=state)
    order: list[str] = []
    for step in range(2, 9):
        order += source.step(step)
        assert len(source.ages) == now[1]
        assert max(source.ages) <= now[0]
        if step == 2:  # another interruption forgets nothing
            assert len(source.state()["under_way"]) >= len(state["under_way"]) - now[1]
    wanted = names(*((step, position) for step, position, _ in state["under_way"]))
    assert order[: len(wanted)] == wanted
    assert source.under_way() == (0, 0)


def test_a_slow_group_is_carried_over_whole(hands: Hands) -> None:
    hands.stuck = set(names((1, 1)))
    source = stream(hands, bound=1)
    found = [*source.step(1)]
    assert found == names((1, 0), (2, 0))  # the oldest that are finished
    assert source.metrics["groups/carried_over"] == 0
    in_store = hands.store.rollouts(hands.run_id)
    assert {r.step for r in in_store if r.group_id == "train-1-1"} == {2}
    hands.stuck = set()
    found += source.step(2)
    assert "train-1-1" in source.group_ids
    assert source.metrics["groups/carried_over"] == 1
    assert source.metrics["seconds/overlapped"] > 0  # it ran while no step waited
    for step in (3, 4, 5):
        found += source.step(step)
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
    assert source.step(1) == names((2, 0), (2, 1))
    assert source.step(2) == second


def test_groups_that_teach_nothing_are_replaced(hands: Hands) -> None:
    def teaches(_step: int, group: list[Rollout]) -> bool:
        return group[0].group_id not in names((1, 0), (1, 1), (1, 2))

    source = stream(hands, resample_zero_variance=3, teaches=teaches)
    # Two, both dull; two more, one of them dull; one more.
    assert source.step(1) == names(*((1, p) for p in range(5)))
    assert source.metrics["groups/resampled"] == hands.waits == 3
    assert source.step(2) == names((2, 0), (2, 1))
    assert hands.tasks() == tasks_in_order(0, 7, TASKS, 3)  # further tasks, none twice

    rounds = stream(hands, resample_zero_variance=1, teaches=lambda _step, _group: False)
    assert len(rounds.step(1)) == 2 * BATCH  # it gives up


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_stream_continues_from_its_state(hands: Hands, ahead: int) -> None:
    options: dict[str, Any] = {
        "steps": 4, "bound": ahead, "resample_zero_variance": 1,
        "teaches": lambda _step, group: not group[0].group_id.endswith("1"),
    }  # fmt: skip

    def seeds() -> dict[Any, Any]:
        return {(new.group_id, new.index): (new.task_id, new.seed) for new in hands.queued}

    whole = stream(hands, **options)
    expected, expected_seeds = [whole.step(step) for step in (1, 2, 3, 4)], seeds()

    before = stream(hands, **options)
    found = [before.step(1), before.step(2)]
    kept = before.state()
    before.step(3)  # and here it dies
    hands.interrupt(after_step=2)
    after = stream(hands, state=kept, **options)
    assert [*found, after.step(3), after.step(4)] == expected
    assert seeds() == expected_seeds
    assert stream(hands).state() == {"planned": 0, "tasks_drawn": 0, "under_way": []}


def test_groups_that_no_step_took_are_canceled(hands: Hands) -> None:
    source = stream(hands, bound=1)
    source.step(1)
    source.close()
    states = [r.state for r in hands.store.rollouts(hands.run_id, purpose=Purpose.TRAIN)]
    assert states.count(RolloutState.CANCELLED) == BATCH * GROUP
    assert source.under_way() == (0, 0)


def test_an_evaluation_does_not_wait_for_the_next_steps_rollouts(hands: Hands) -> None:
    stream(hands, bound=2).step(1)
    ahead = hands.store.enqueue(hands.run_id, [*hands.queued])
    ran: list[str] = []

    def one_rollout() -> None:
        claim = hands.store.claim("hands", 60, hands.run_id)
        assert claim is not None
        ran.append(claim.rollout_id)
        hands.store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)

    hands.work = one_rollout  # type: ignore[method-assign]
    plan = plan_evaluation(hands.task_ids, 1, EvaluationSettings(), seed=3)
    done = hands.execute(plan, nothing)
    assert ran == [rollout.id for rollout in done]
    assert {rollout.purpose for rollout in done} == {Purpose.EVAL}
    assert hands.store.unfinished_ids(hands.run_id, Purpose.TRAIN) >= {*ahead}
