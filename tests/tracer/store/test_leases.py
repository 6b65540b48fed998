"""Claims in queue order, leases that end, and keys."""

from __future__ import annotations

import subprocess
import sys
import time

import sqlalchemy as sa
from store_records import claimed, start_run

from agentrl_tracer.schemas import AttemptState, Claim, NewRollout, Purpose, RolloutState
from agentrl_tracer.store import Store, tables


def test_claims_follow_the_queue_and_give_each_rollout_once(store: Store) -> None:
    run_id = start_run(store, rollouts=3)
    claims = [claimed(store) for _ in range(3)]
    assert [c.rollout_id for c in claims] == [r.id for r in store.rollouts(run_id)]
    assert claims[0].task == {"n": 7}
    assert store.claim("runner", 30) is None


def test_what_is_waited_for_is_claimed_first(store: Store) -> None:
    run_id = start_run(store, rollouts=3)
    running = claimed(store)
    (task,) = store.add_tasks(run_id, "eval", [{"n": 8}])
    evaluation = [NewRollout(task, "e", Purpose.EVAL, 1, i, seed=i) for i in range(2)]
    first = store.enqueue(run_id, evaluation, first=True)
    second = store.enqueue(run_id, evaluation, first=True)
    training = [r.id for r in store.rollouts(run_id, purpose=Purpose.TRAIN)]
    assert training[0] == running.rollout_id
    claims = [claimed(store).rollout_id for _ in range(6)]
    assert claims == [*second, *first, *training[1:]]
    last = store.enqueue(run_id, evaluation)
    assert [r.id for r in store.rollouts(run_id)][-2:] == last


CLAIM_ALL = """
import sys
from agentrl_tracer.schemas import AttemptState
from agentrl_tracer.store import Store

store = Store(sys.argv[1], pooled=False)
while claim := store.claim("r", 30):
    print(claim.rollout_id)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
"""


def test_processes_share_the_queue(store: Store) -> None:
    run_id = start_run(store, rollouts=60)
    command = [sys.executable, "-c", CLAIM_ALL, store.url]
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


def test_a_lost_lease_makes_a_new_attempt_and_shuts_the_old_one_out(store: Store) -> None:
    run_id = start_run(store)
    old = claimed(store, lease_s=5)
    assert store.expire_leases() == []
    assert store.heartbeat(old.attempt_id, 5)
    assert store.expire_leases(now=time.time() + 6) == [old.attempt_id]
    assert not store.heartbeat(old.attempt_id, 5)
    new = claimed(store)
    assert new.rollout_id == old.rollout_id
    assert new.attempt_number == 2
    assert store.end_attempt(old.attempt_id, AttemptState.SUCCEEDED) is None
    assert store.end_attempt(new.attempt_id, AttemptState.SUCCEEDED) == RolloutState.SUCCEEDED
    assert store.rollouts(run_id)[0].winner == new.attempt_id


def test_a_heartbeat_renews_no_other_lease(store: Store) -> None:
    start_run(store, rollouts=2)
    alive, dead = claimed(store, lease_s=5), claimed(store, lease_s=5)
    assert store.heartbeat(alive.attempt_id, 60)
    assert store.expire_leases(now=time.time() + 6) == [dead.attempt_id]
