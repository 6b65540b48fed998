"""Claims in queue order, leases that end, keys, and what an attempt's end makes of its rollout."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from fake_gateway import until
from store_records import claimed, record_spans, start_run, waits_for_a_lock

from agentrl_tracer.schemas import (
    AttemptState,
    Claim,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    RolloutState,
)
from agentrl_tracer.store import Store, leases, tables
from agentrl_trainer.data.rewards import rollout_reward

on_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)


@pytest.mark.parametrize(
    ("policies", "state", "expected"),
    [
        (Policies(on_error="retry", max_attempts=2), AttemptState.ERROR, RolloutState.QUEUED),
        (Policies(on_error="retry", max_attempts=1), AttemptState.ERROR, RolloutState.FAILED),
        (Policies(on_error="drop"), AttemptState.ERROR, RolloutState.FAILED),
        (Policies(on_error=-1.0), AttemptState.ERROR, RolloutState.SUCCEEDED),
        (Policies(on_timeout="drop"), AttemptState.TIMEOUT, RolloutState.FAILED),
        (Policies(on_timeout=0.0), AttemptState.TIMEOUT, RolloutState.SUCCEEDED),
        (Policies(max_attempts=1), AttemptState.INFRASTRUCTURE, RolloutState.QUEUED),
        (Policies(max_infrastructure_retries=0), AttemptState.LOST, RolloutState.FAILED),
        (Policies(), AttemptState.SUCCEEDED, RolloutState.SUCCEEDED),
        (Policies(on_missing_reward="retry"), AttemptState.SUCCEEDED, RolloutState.QUEUED),
        (
            Policies("drop", "drop", "retry", max_attempts=1),
            AttemptState.SUCCEEDED,
            RolloutState.SUCCEEDED,
        ),
        (Policies(on_missing_reward=-0.5), AttemptState.SUCCEEDED, RolloutState.SUCCEEDED),
    ],
)
def test_policies_decide(
    store: Store, policies: Policies, state: AttemptState, expected: RolloutState
) -> None:
    run_id = start_run(store, policies=policies)
    claim = claimed(store)
    assert store.end_attempt(claim.attempt_id, state, error="boom") == expected
    (rollout,) = store.rollouts(run_id)
    assert rollout.state == expected
    assert rollout.winner == (claim.attempt_id if expected == RolloutState.SUCCEEDED else None)
    rewards = store.rewards([claim.rollout_id])
    decided = (policies.on_error, policies.on_timeout, policies.on_missing_reward)
    numbers = [p for p in decided if not isinstance(p, str)]
    assert [r.value for r in rewards] == numbers
    if expected == RolloutState.FAILED:
        assert rollout.reason is not None
        assert "boom" in rollout.reason


def test_a_missing_reward_is_tried_again_and_an_emitted_one_is_not(store: Store) -> None:
    run_id = start_run(store, policies=Policies(on_missing_reward="retry", max_attempts=2))
    first = claimed(store)
    assert store.end_attempt(first.attempt_id, AttemptState.SUCCEEDED) == RolloutState.QUEUED
    second = claimed(store)
    assert second.attempt_number == 2
    reward = Reward(second.attempt_id, second.rollout_id, "reward", 1.0, key="span")
    record_spans(store, [], [reward])
    assert store.end_attempt(second.attempt_id, AttemptState.SUCCEEDED) == RolloutState.SUCCEEDED
    outcomes = store.outcomes(run_id, step=1, purpose=Purpose.TRAIN)
    assert outcomes.attempts == {"no_reward": 1, "succeeded": 1}
    assert outcomes.rollouts == {"succeeded": 1}
    assert outcomes.metrics()["attempts/no_reward"] == 1
    assert store.outcomes(run_id, purpose=Purpose.EVAL).attempts == {}


def test_a_policys_reward_stands_instead_of_what_was_emitted(store: Store) -> None:
    run_id = start_run(store, policies=Policies(on_error=-1.0))
    claim = claimed(store)
    emitted = Reward(claim.attempt_id, claim.rollout_id, "reward", 5.0, key="span")
    record_spans(store, [], [emitted])
    store.end_attempt(claim.attempt_id, AttemptState.ERROR, error="boom")
    rewards = store.rewards([claim.rollout_id])
    assert sorted(r.value for r in rewards) == [-1.0, 5.0]  # nothing recorded is lost
    (rollout,) = store.rollouts(run_id)
    assert rollout_reward(rollout, rewards) == -1.0
    outcomes = store.outcomes(run_id)
    assert outcomes.policy_rewards == {"on_error": 1}
    assert outcomes.metrics()["rewards/on_error"] == 1


def test_an_error_that_no_database_takes_ends_its_attempt(store: Store, postgres: str) -> None:
    with closing(Store(postgres)) as remote:
        for one in (store, remote):
            start_run(one)
            claim = claimed(one)
            one.end_attempt(claim.attempt_id, AttemptState.ERROR, error="half \ud83d, none \0")
            [attempt, *_] = one.attempts([claim.rollout_id])
            assert (attempt.state, attempt.error) == (
                AttemptState.ERROR,
                "half \\ud83d, none \ufffd",
            )


def test_infrastructure_retries_do_not_use_up_attempts(store: Store) -> None:
    run_id = start_run(store, policies=Policies(max_attempts=2))
    for state in [AttemptState.INFRASTRUCTURE] * 3 + [AttemptState.ERROR]:
        assert store.end_attempt(claimed(store).attempt_id, state) == RolloutState.QUEUED
    assert store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR) == RolloutState.FAILED
    assert store.rollouts(run_id)[0].attempts == 5


def test_claims_follow_the_queue_and_what_is_waited_for_is_claimed_first(store: Store) -> None:
    run_id = start_run(store, rollouts=3)
    running = claimed(store)
    assert running.task == {"n": 7}
    (task,) = store.add_tasks(run_id, "eval", [{"n": 8}])
    evaluation = [NewRollout(task, "e", Purpose.EVAL, 1, i, seed=i) for i in range(2)]
    first = store.enqueue(run_id, evaluation, first=True)
    second = store.enqueue(run_id, evaluation, first=True)
    training = [r.id for r in store.rollouts(run_id, purpose=Purpose.TRAIN)]
    assert training[0] == running.rollout_id
    claims = [claimed(store).rollout_id for _ in range(6)]
    assert claims == [*second, *first, *training[1:]]
    assert store.claim("runner", 30, run_id) is None
    last = store.enqueue(run_id, evaluation)
    assert [r.id for r in store.rollouts(run_id)][-2:] == last


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("query", [leases._ANY_QUEUED, leases._FIRST_QUEUED])
def test_a_claim_reads_one_entry_however_long_the_queue_is(
    store: Store, query: sa.Select[Any], statistics: bool
) -> None:
    if store.db.engine.name == "postgresql":  # else it may gather statistics meanwhile
        store.db.execute(sa.text("ALTER TABLE rollouts SET (autovacuum_enabled = off)"))
    run_id = start_run(store, rollouts=6000)
    finished = "UPDATE rollouts SET state = 'succeeded' WHERE \"index\" < 2000"
    store.db.execute(sa.text(finished))
    if statistics:
        store.db.execute(sa.text("ANALYZE"))
    bound = query.params(run=run_id).compile(
        store.db.engine, compile_kwargs={"literal_binds": True}
    )
    explain = "EXPLAIN QUERY PLAN" if store.db.engine.name == "sqlite" else "EXPLAIN"
    plan = [str(row[-1]) for row in store.db.fetch_rows(sa.text(f"{explain} {bound}"))]
    assert any("rollouts_queue" in line for line in plan)
    assert not any(word in line for line in plan for word in ("Sort", "TEMP B-TREE", "Bitmap"))


CLAIM_ALL = """
import sys
from agentrl_tracer.schemas import AttemptState
from agentrl_tracer.store import Store

store = Store(sys.argv[1])
while claim := store.claim("r", 30, sys.argv[2]):
    print(claim.rollout_id)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
"""


def test_processes_share_the_queue(store: Store) -> None:
    run_id = start_run(store, rollouts=60)
    command = [sys.executable, "-c", CLAIM_ALL, store.url, run_id]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    taken = [line for worker in workers for line in worker.communicate(timeout=60)[0].split()]
    assert sorted(taken) == sorted(r.id for r in store.rollouts(run_id))
    assert {r.state for r in store.rollouts(run_id)} == {RolloutState.SUCCEEDED}


def test_key_opens_its_attempt_and_is_not_stored(store: Store, claim: Claim) -> None:
    ref = store.authenticate(claim.key)
    assert ref is not None
    assert (ref.attempt_id, ref.state) == (claim.attempt_id, AttemptState.RUNNING)
    assert store.authenticate("sk-agentrl-guess") is None
    with store.db.read() as c:
        assert claim.key not in str(c.execute(sa.select(tables.attempts)).all())


def test_several_attempts_are_looked_up_at_once(store: Store) -> None:
    start_run(store, rollouts=3)
    claims = [claimed(store) for _ in range(3)]
    ids = [claim.attempt_id for claim in claims]
    store.end_attempt(ids[0], AttemptState.SUCCEEDED)
    states = [AttemptState.SUCCEEDED, AttemptState.RUNNING, AttemptState.RUNNING]
    assert store.attempt_states([*ids, "none"]) == dict(zip(ids, states, strict=True))
    known = store.authenticate_all(["none", *(claim.key for claim in claims)])
    assert {key: one.attempt_id for key, one in known.items()} == {
        claim.key: claim.attempt_id for claim in claims
    }


def test_a_dead_pools_leases_end_and_no_others(store: Store) -> None:
    run_id = start_run(store, rollouts=3)
    theirs, ours, other = (
        store.claim(f"{runner}-host-1-0", 60.0, run_id) for runner in ("b", "a", "aa")
    )
    assert theirs
    assert ours
    assert other
    assert store.end_leases("a") == [ours.attempt_id]
    assert store.attempt_state(ours.attempt_id) is AttemptState.LOST
    for claim in (theirs, other):
        assert store.heartbeat(claim.attempt_id, 60.0)
    again = claimed(store)
    assert (again.rollout_id, again.attempt_number) == (ours.rollout_id, 2)


@on_postgres
@pytest.mark.parametrize("wrong_s", [-60.0, 60.0])
def test_leases_end_by_the_servers_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    start_run(store, rollouts=2)
    right, theirs = claimed(store, lease_s=15), None
    with monkeypatch.context() as other_machine:
        clock = SimpleNamespace(time=lambda: time.time() + wrong_s)
        other_machine.setattr(leases, "time", clock)
        theirs = claimed(store, lease_s=15)
        assert store.heartbeat(theirs.attempt_id, 15)
        assert store.expire_leases() == []
    assert store.expire_leases() == []
    for claim in (right, theirs):
        assert store.heartbeat(claim.attempt_id, 15)


@on_postgres
def test_a_rollout_that_is_claimed_meanwhile_is_canceled_with_its_attempt(store: Store) -> None:
    run_id = start_run(store)
    claims = list[Claim | None]()
    begun = threading.Event()

    def pause(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("INSERT INTO attempts"):
            begun.set()
            until(partial(waits_for_a_lock, store))

    with closing(Store(store.url)) as runners:
        sa.event.listen(runners.db.engine, "before_cursor_execute", pause)
        work = threading.Thread(target=lambda: claims.append(runners.claim("r", 60.0, run_id)))
        work.start()
        assert begun.wait(10)
        assert store.cancel(run_id, "over") == 1
        work.join()
    [claim] = claims
    assert claim is not None
    assert store.attempt_state(claim.attempt_id) is AttemptState.CANCELLED
    assert store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED) is None
    assert store.rollouts(run_id)[0].state is RolloutState.CANCELLED


def test_a_lost_lease_makes_a_new_attempt_and_shuts_the_old_one_out(store: Store) -> None:
    run_id = start_run(store, rollouts=2)
    old, alive = claimed(store, lease_s=5), claimed(store, lease_s=5)
    assert store.expire_leases() == []
    assert store.heartbeat(old.attempt_id, 5)
    assert store.heartbeat(alive.attempt_id, 60)  # renews no other lease
    assert store.expire_leases(now=time.time() + 6) == [old.attempt_id]
    assert not store.heartbeat(old.attempt_id, 5)
    new = claimed(store)
    assert new.rollout_id == old.rollout_id
    assert new.attempt_number == 2
    assert store.end_attempt(old.attempt_id, AttemptState.SUCCEEDED) is None
    assert store.end_attempt(new.attempt_id, AttemptState.SUCCEEDED) == RolloutState.SUCCEEDED
    assert store.rollouts(run_id)[0].winner == new.attempt_id
