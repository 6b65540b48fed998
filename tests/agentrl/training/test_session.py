"""While the trainer computes, the session notices runners that died."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from agentrl.training.session import Session
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose
from agentrl_tracer.store import Store


class Waiting(Session):
    """A session whose runners are played here."""

    def __init__(self, store: Store, *, alive: bool = True) -> None:
        self.store, self.pool = store, Mock()
        self.pool.alive.side_effect = lambda: alive or self.pool.restart.called
        self._next_maintenance = 0.0


def computed(seconds: float, error: Exception | None = None) -> Future[str]:
    future: Future[str] = Future()
    end = future.set_exception if error else future.set_result
    threading.Timer(seconds, end, [error or "learned"]).start()
    return future


def test_a_dead_runners_lease_is_noticed_while_the_trainer_learns(store: Store) -> None:
    run_id = store.create_run("run", "train", {})
    (task,) = store.add_tasks(run_id, "train", [{"n": 7}])
    store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 1, 0, seed=1)])
    lost = store.claim("dies at once", 0.2, run_id)
    assert lost is not None
    learning = computed(2.5)
    again: list[bool] = []

    def other_runner() -> None:
        while not learning.done():
            if store.claim("lives", 60.0, run_id) is not None:
                again.append(learning.done())
            time.sleep(0.05)

    other = threading.Thread(target=other_runner)
    other.start()
    assert Waiting(store).result(learning) == "learned"
    other.join()
    assert again == [False], "another runner had it before the update was over"
    states = [attempt.state for attempt in store.attempts([lost.rollout_id])]
    assert states == [AttemptState.LOST, AttemptState.RUNNING]


def test_runners_that_died_are_started_again(store: Store) -> None:
    waiting = Waiting(store, alive=False)
    with pytest.raises(ValueError, match="no gradient"):
        waiting.result(computed(0.8, ValueError("no gradient")))
    assert waiting.pool.restart.call_count == 1


def test_what_is_there_is_not_waited_for(store: Store) -> None:
    done: Future[int] = Future()
    done.set_result(3)
    started = time.monotonic()
    assert Waiting(store).result(done) == 3
    assert time.monotonic() - started < 0.4
