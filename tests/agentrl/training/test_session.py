"""A session maintains leases while the trainer computes, and ends though the store is away."""

from __future__ import annotations

import fcntl
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from agentrl.training import session
from agentrl.training.session import Session
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose
from agentrl_tracer.store import Store, database


class StoreOnly(Session):
    """A session without processes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run_id = store.create_run("run", "train", {})
        self._next_maintenance = 0.0

    def _stop(self) -> None: ...


def test_a_dead_runners_lease_is_noticed_while_the_trainer_learns(store: Store) -> None:
    run_id = store.create_run("run", "train", {})
    (task,) = store.add_tasks(run_id, "train", [{"n": 7}])
    store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 1, 0, seed=1)])
    lost = store.claim("dies at once", 0.2, run_id)
    assert lost is not None
    again: list[bool] = []
    with ThreadPoolExecutor() as threads:
        learning = threads.submit(time.sleep, 2.5)

        def other_runner() -> None:
            while not learning.done():
                if store.claim("lives", 60.0, run_id) is not None:
                    again.append(learning.done())
                time.sleep(0.05)

        other = threading.Thread(target=other_runner)
        other.start()
        StoreOnly(store).result(learning)
        other.join()
    assert again == [False], "another runner had it before the update was over"
    states = [attempt.state for attempt in store.attempts([lost.rollout_id])]
    assert states == [AttemptState.LOST, AttemptState.RUNNING]


def test_a_finished_computation_is_returned_or_raised_at_once(store: Store) -> None:
    done: Future[int] = Future()
    done.set_result(3)
    failed: Future[int] = Future()
    failed.set_exception(ValueError("no gradient"))
    started = time.monotonic()
    assert StoreOnly(store).result(done) == 3
    with pytest.raises(ValueError, match="no gradient"):
        StoreOnly(store).result(failed)
    assert time.monotonic() - started < 0.4


def test_a_run_ends_soon_while_its_store_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited for the store before it failed."""
    monkeypatch.setattr(database, "_TURN_S", 0.1)
    monkeypatch.setattr(session, "_FAREWELL_S", 0.2)
    ending = StoreOnly(store)
    with open(f"{store.db.engine.url.database}-queue", "r+") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)  # of another process that is stopped
        free = threading.Timer(5, fcntl.flock, (queue, fcntl.LOCK_UN))
        free.start()
        ending.__exit__(None, ValueError("the first error"), None)
        assert free.is_alive(), "it waited until the store was back"
        free.cancel()
