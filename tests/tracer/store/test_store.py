from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import (
    AttemptState,
    Call,
    CallState,
    Claim,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    RolloutState,
    SkipReason,
)
from agentrl_tracer.store import Store, database, tables
from agentrl_tracer.store.writer import TraceWriter
from agentrl_trainer.data.rewards import rollout_reward


def start_run(store: Store, rollouts: int = 1, policies: Policies | None = None) -> str:
    run_id = store.create_run("test", "train", {}, policies)
    (task,) = store.add_tasks(run_id, "train", [{"n": 7}])
    store.enqueue(
        run_id,
        [NewRollout(task, "g", Purpose.TRAIN, 1, i, seed=i) for i in range(rollouts)],
    )
    return run_id


def claimed(store: Store, lease_s: float = 30.0) -> Claim:
    claim = store.claim("runner", lease_s)
    assert claim is not None
    return claim


def call_of(claim: Claim, name: str, **changes: object) -> Call:
    call = Call(
        id=name, response_id=name, choice=0, run_id=claim.run_id, rollout_id=claim.rollout_id,
        attempt_id=claim.attempt_id, seq=0, agent=None, model="m", adapter="policy",
        adapter_version=3, state=CallState.COMPLETED, prompt_ids=[1, 2], response_ids=[151643],
        response_logprobs=[-0.25], finish_reason="stop", params={}, request=None, response=None,
        error=None, trace_id=None, span_id=None, started_at=1.0, ended_at=2.0,
    )  # fmt: skip
    return replace(call, **changes)


def test_an_old_store_is_migrated_to_the_tables_of_a_new_one(tmp_path: Path) -> None:
    scripts = ScriptDirectory(str(Path(database.__file__).parent / "migrations"))
    assert scripts.get_current_head() == database.HEAD
    with closing(sqlite3.connect(tmp_path / "old.db")) as old:
        old.executescript(Path(__file__).with_name("schema_0001.sql").read_text())
        old.executescript(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);"
            "INSERT INTO alembic_version VALUES ('0001');"
        )
    for name in ("old.db", "new.db"):
        store = Store(str(tmp_path / name))
        with store.db.read() as connection:
            context = MigrationContext.configure(connection)
            assert compare_metadata(context, tables.metadata) == []
            assert context.get_current_revision() == database.HEAD
        assert len(store.runs()) == 0
        store.close()


def test_ids_are_distinct_and_sort_by_their_moment() -> None:
    ids = [new_id("call-") for _ in range(2_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {29}


def test_a_store_of_the_future_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    store = Store(path)
    with store.db.write() as c:
        c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(RuntimeError, match="upgrade agentrl"):
        Store(path)


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


def test_key_opens_its_attempt_and_is_not_stored(store: Store) -> None:
    start_run(store)
    claim = claimed(store)
    ref = store.authenticate(claim.key)
    assert ref is not None
    assert (ref.attempt_id, ref.state) == (claim.attempt_id, AttemptState.RUNNING)
    assert store.authenticate("sk-agentrl-guess") is None
    with store.db.read() as c:
        assert claim.key not in str(c.execute(sa.select(tables.attempts)).all())


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
            Policies(on_missing_reward="retry", max_attempts=1),
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
    store.record_spans([], [reward])
    assert store.end_attempt(second.attempt_id, AttemptState.SUCCEEDED) == RolloutState.SUCCEEDED
    outcomes = store.outcomes(run_id, step=1, purpose=Purpose.TRAIN)
    assert outcomes.attempts == {"no_reward": 1, "succeeded": 1}
    assert outcomes.rollouts == {"succeeded": 1}
    assert outcomes.metrics()["attempts/no_reward"] == 1
    assert store.outcomes(run_id, purpose=Purpose.EVAL).attempts == {}


def test_a_policys_reward_stands_instead_of_what_was_emitted(store: Store) -> None:
    run_id = start_run(store, policies=Policies(on_error=-1.0))
    claim = claimed(store)
    store.record_spans([], [Reward(claim.attempt_id, claim.rollout_id, "reward", 5.0, key="span")])
    store.end_attempt(claim.attempt_id, AttemptState.ERROR, error="boom")
    rewards = store.rewards([claim.rollout_id])
    assert sorted(r.value for r in rewards) == [-1.0, 5.0]  # nothing recorded is lost
    (rollout,) = store.rollouts(run_id)
    assert rollout_reward(rollout, rewards) == -1.0
    outcomes = store.outcomes(run_id)
    assert outcomes.policy_rewards == {"on_error": 1}
    assert outcomes.metrics()["rewards/on_error"] == 1


def test_infrastructure_retries_do_not_use_up_attempts(store: Store) -> None:
    run_id = start_run(store, policies=Policies(max_attempts=2))
    for state in [AttemptState.INFRASTRUCTURE] * 3 + [AttemptState.ERROR]:
        assert store.end_attempt(claimed(store).attempt_id, state) == RolloutState.QUEUED
    assert store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR) == RolloutState.FAILED
    assert store.rollouts(run_id)[0].attempts == 5


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


async def test_calls_come_back_as_they_were_written(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    call = call_of(claim, "c1", response={"a": [1]}, response_logprobs=[-0.5])
    writer.open(replace(call, state=CallState.OPEN))
    assert await writer.finish(call) is AttemptState.RUNNING
    writer.close()
    assert store.calls(attempt_ids=[claim.attempt_id]) == [call]
    accounting = store.accounting(run_id)
    assert (accounting.proxied, accounting.recorded, accounting.pending) == (1, 1, 1)


async def test_a_late_call_is_kept_and_named(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    writer.open(call_of(claim, "late", state=CallState.OPEN))
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    assert await writer.finish(call_of(claim, "late")) is AttemptState.SUCCEEDED
    writer.close()
    assert store.accounting(run_id).skipped == {SkipReason.LATE_CALL: 1}


async def test_calls_open_at_a_gateways_death_are_lost_with_a_reason(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("first", run_id, 1)
    writer = TraceWriter(store, "first")
    writer.open(call_of(claim, "lost", state=CallState.OPEN, response_ids=[]))
    assert await writer.finish(call_of(claim, "done")) is AttemptState.RUNNING
    writer.close()
    assert store.register_gateway("second", run_id, 2) == 1
    lost, done = sorted(store.calls(attempt_ids=[claim.attempt_id]), key=lambda c: c.id != "lost")
    assert (lost.state, lost.skip_reason) == (CallState.ERROR, SkipReason.GATEWAY_LOST)
    assert (done.state, done.skip_reason) == (CallState.COMPLETED, None)


async def test_the_sum_notices_a_lost_record(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    for name in ("a", "b"):
        writer.open(call_of(claim, name, state=CallState.OPEN))
        await writer.finish(call_of(claim, name))
    writer.close()
    store.settle(trained={"a": 1}, skipped={"b": SkipReason.ZERO_ADVANTAGE})
    assert store.accounting(run_id).adds_up
    with store.db.write() as c:  # break it on purpose
        c.execute(tables.calls.delete().where(tables.calls.c.id == "b"))
    assert not store.accounting(run_id).adds_up


def test_the_writers_own_reads_are_of_now_and_leave_nothing_open(tmp_path: Path) -> None:
    """They go through the connection that writes; others write meanwhile, other threads ask."""
    store, other = (Store(str(tmp_path / "store.db")) for _ in range(2))
    run_id = start_run(store, rollouts=2)
    first, second = claimed(other), claimed(other)
    store.register_gateway("boot", run_id, 1)

    def write(claim: Claim, name: str) -> AttemptState | None:
        states = store.write_calls("boot", [], [call_of(claim, name)], 1, wait=False)
        return states[claim.attempt_id]

    def sum_of_pages_left() -> int:
        with other.db.read() as c:
            busy, log, moved = c.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
        return busy + log - moved

    assert write(first, "a") is AttemptState.RUNNING
    assert store.attempt_state(first.attempt_id) is AttemptState.RUNNING
    other.end_attempt(first.attempt_id, AttemptState.SUCCEEDED)
    assert store.attempt_state(first.attempt_id) is AttemptState.SUCCEEDED
    assert write(second, "b") is AttemptState.RUNNING  # what was read has not kept it in the past
    assert write(first, "c") is AttemptState.SUCCEEDED
    assert store.attempt_state(second.attempt_id) is AttemptState.RUNNING
    assert sum_of_pages_left() == 0
    asked: list[AttemptState | None] = []
    asking = threading.Thread(target=lambda: asked.append(store.attempt_state(first.attempt_id)))
    asking.start()
    asking.join()
    assert asked == [AttemptState.SUCCEEDED]
    for one in (store, other):
        one.close()


async def test_a_failing_database_fails_the_call_not_the_writer(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    with pytest.raises((sa.exc.StatementError, TypeError)):  # by driver
        await writer.finish(call_of(claim, "bad", params={"not json": object()}))
    assert await writer.finish(call_of(claim, "good")) is AttemptState.RUNNING
    writer.close()


async def test_what_the_database_refuses_fails_alone(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    commits: list[int] = []
    write_calls = store.write_calls
    busy = threading.Event()

    def watched(boot_id: str, opened: Any, finished: Any, *rest: Any, wait: bool = True) -> Any:
        if not wait:
            raise sa.exc.OperationalError("BEGIN", {}, Exception("somebody else is writing"))
        commits.append(len(finished))
        busy.wait(10)  # so that what comes meanwhile is one batch
        return write_calls(boot_id, opened, finished, *rest)

    store.write_calls = watched
    calls = [call_of(claim, "first"), call_of(claim, "bad", params={"x": object()})]
    calls.append(call_of(claim, "good"))
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(writer.finish(call)))
        await asyncio.sleep(0.1)
    busy.set()
    first, bad, good = await asyncio.gather(*tasks, return_exceptions=True)
    assert commits == [1, 2, 1, 1]
    assert (first, good) == (AttemptState.RUNNING, AttemptState.RUNNING)
    assert isinstance(bad, sa.exc.StatementError | TypeError)
    writer.close()


async def test_a_turns_calls_are_one_commit_on_the_event_loop(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.db"))
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    commits: list[tuple[str, int, int]] = []
    write_calls = store.write_calls

    def watched(boot_id: str, opened: Any, finished: Any, *rest: Any, **options: Any) -> Any:
        commits.append((threading.current_thread().name, len(opened), len(finished)))
        return write_calls(boot_id, opened, finished, *rest, **options)

    store.write_calls = watched
    for name in ("a", "b"):
        writer.open(call_of(claim, name, state=CallState.OPEN))
    finished = (writer.finish(call_of(claim, name)) for name in ("a", "b"))
    assert await asyncio.gather(*finished) == [AttemptState.RUNNING] * 2
    assert commits == [("MainThread", 2, 2)]
    # Somebody else writes: the thread waits for him, the event loop goes on.
    with store.db.write():
        waiting = asyncio.create_task(writer.finish(call_of(claim, "c")))
        for _ in range(10):
            await asyncio.sleep(0.02)
        assert not waiting.done()
    assert await waiting is AttemptState.RUNNING
    assert [name for name, _, _ in commits[1:]] == ["MainThread", "trace-writer"]
    # After so many rows the thread has a turn (more of them on a slow disk): the log is moved.
    for i in range(300):
        await writer.finish(call_of(claim, f"d{i}"))
    assert "trace-writer" in [name for name, _, _ in commits[3:]]
    writer.open(call_of(claim, "marked", state=CallState.OPEN))
    await asyncio.sleep(0.1)
    assert store.accounting(run_id).recorded == 304
    writer.close()
    store.close()


def test_continuity_is_counted_for_each_rollout(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    said: list[Any] = [
        {"continued": False, "branched": "first_call"},
        {"continued": True},
        {"continued": True, "branched": "history_edited"},
        {"continued": True},
        {"n": 1},  # another model's
    ]
    calls = [call_of(claim, f"c{i}", params=params) for i, params in enumerate(said)]
    store.write_calls("boot", [], calls, len(calls))
    expected = {"first_call": 1, "continued": 3, "history_edited": 1}
    assert store.continuity(run_id) == {claim.rollout_id: expected}
    assert store.continuity("another") == {}


def test_a_verdict_stands(store: Store) -> None:
    start_run(store)
    claim = claimed(store)
    store.write_calls("boot", [], [call_of(claim, "x")], 1)
    store.settle(trained={}, skipped={"x": SkipReason.ZERO_ADVANTAGE})
    store.settle(trained={"x": 4}, skipped={})
    (call,) = store.calls(attempt_ids=[claim.attempt_id])
    assert (call.trained_step, call.skip_reason) == (None, SkipReason.ZERO_ADVANTAGE)


def test_a_resumed_run_supersedes_what_it_repeats(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.write_calls("boot", [], [call_of(claim, "x")], 1)
    store.settle(trained={"x": 1}, skipped={})
    assert store.supersede(run_id, after_step=1) == 0
    store.write_calls("boot", [], [call_of(claim, "under way")], 1)
    assert store.supersede(run_id, after_step=1) == 1
    assert store.supersede(run_id, after_step=0) == 1
    assert store.accounting(run_id).skipped == {SkipReason.SUPERSEDED: 2}
    assert store.cancel(run_id, "resumed", after_step=0) == 1
    assert store.rollouts(run_id)[0].state == RolloutState.CANCELLED


def test_a_resumed_run_counts_what_it_repeats_once(store: Store) -> None:
    run_id = start_run(store, rollouts=1)
    (task,) = store.add_tasks(run_id, "eval", [{"n": 8}])
    new = [NewRollout(task, f"e{step}", Purpose.EVAL, step, 0, seed=1) for step in (0, 1, 2)]
    store.enqueue(run_id, new)
    for name in ("train 1", "eval 0", "eval 1", "eval 2"):
        claim = claimed(store)
        store.write_calls("boot", [], [call_of(claim, name)], 1)
        store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
        if name.startswith("eval"):
            store.settle(trained={}, skipped={name: SkipReason.EVALUATION})
        else:
            store.settle(trained={name: 1}, skipped={})

    def standing() -> set[str]:
        calls = store.calls(rollout_ids=[r.id for r in store.rollouts(run_id)])
        return {call.id for call in calls if call.skip_reason != SkipReason.SUPERSEDED}

    assert store.cancel(run_id, "resumed", after_step=1, evaluated=True) == 1
    store.supersede(run_id, after_step=1)
    assert standing() == {"train 1", "eval 0", "eval 1"}
    assert store.cancel(run_id, "resumed", after_step=1, evaluated=False) == 2
    store.supersede(run_id, after_step=1)
    assert standing() == {"train 1", "eval 0"}
    assert store.outcomes(run_id, purpose=Purpose.EVAL).attempts == {"succeeded": 1}
    assert store.accounting(run_id).skipped == {
        SkipReason.EVALUATION: 1,
        SkipReason.SUPERSEDED: 2,
    }


def test_of_many_same_requests_the_newest_are_looked_after(store: Store) -> None:
    run_id = start_run(store)
    claim = claimed(store)
    store.register_gateway("one", run_id, 1)
    asked = [
        call_of(claim, f"a{i}", seq=i, request=ODD, prompt_ids=[1], response_ids=[7, i, 0])
        for i in range(40)
    ]
    later = call_of(claim, "b", seq=40, request={}, prompt_ids=[1, 7, 30, 5], response_ids=[6])
    store.write_calls("one", [], [*asked, later], 41)
    found = store.same_requests(claim.attempt_id, ODD)
    assert [past.call.seq for past in found] == list(range(40))
    assert [past.continued for past in found] == [i < 24 or i == 30 for i in range(40)]


def test_a_reward_delivered_twice_counts_once(store: Store) -> None:
    start_run(store)
    claim = claimed(store)
    reward = Reward(claim.attempt_id, claim.rollout_id, "reward", 1.0, key="span-1")
    store.record_spans([], [reward])
    store.record_spans([], [reward, replace(reward, key="span-2", value=0.5)])
    assert [r.value for r in store.rewards([claim.rollout_id])] == [1.0, 0.5]


def test_adapters_and_metrics(store: Store) -> None:
    run_id = store.create_run("test", "train", {})
    for version in (0, 1, 2):
        store.publish_adapter(run_id, "policy", version, f"/v{version}", version)
    assert [a.version for a in store.latest_adapters(run_id)] == [2]
    store.drop_adapters_after(run_id, 1)
    assert [a.version for a in store.latest_adapters(run_id)] == [1]
    store.log_metrics(run_id, 1, {"loss": 0.5})
    store.log_metrics(run_id, 1, {"loss": 0.25, "x": 1})
    store.log_metrics(run_id, 2, {"loss": 0.5})
    store.drop_metrics_after(run_id, 1)
    assert store.metrics(run_id) == {1: {"loss": 0.25, "x": 1.0}}


ODD = {"messages": [{"role": "user", "content": "grüße \0 \U0001f44d \\u0000"}], "seed": 2**70}


@pytest.mark.parametrize("request_", [ODD, {"temperature": 1.0, "x": "\ud800"}, {}])
def test_same_requests_are_found_by_what_was_asked(store: Store, request_: Any) -> None:
    run_id = start_run(store, rollouts=2)
    first, other = claimed(store), claimed(store)
    store.register_gateway("one", run_id, 1)
    backwards = dict(reversed([*request_.items(), ("n", 1)]))
    asked = [
        call_of(first, "a", seq=0, request=request_, prompt_ids=[1], response_ids=[7, 8, 0]),
        call_of(first, "b", seq=1, request=request_, prompt_ids=[1], response_ids=[7, 9, 0]),
        call_of(first, "c", seq=2, request=backwards, prompt_ids=[1, 7, 8, 5], response_ids=[6]),
        call_of(other, "d", seq=0, request=request_),
    ]
    store.write_calls("one", [], asked, 4)
    store.write_calls("one", [call_of(first, "e", seq=3, request=request_)], [], 1)
    found = store.same_requests(first.attempt_id, request_)
    assert [(past.call.id, past.continued) for past in found] == [
        ("a", True), ("b", False), ("e", False),
    ]  # fmt: skip
    assert found[0].call == replace(asked[0], request=found[0].call.request)
    assert [past.call.id for past in store.same_requests(first.attempt_id, backwards)] == ["c"]
