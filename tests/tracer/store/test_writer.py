"""TraceWriter: group commits, on the event loop and in the thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import call_of, claimed, start_run

from agentrl_tracer.schemas import AttemptState, CallState, Claim, SkipReason
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter


@pytest.fixture
def writer(store: Store, claim: Claim) -> Iterator[TraceWriter]:
    writer = TraceWriter(store, "boot")
    yield writer
    writer.close()


async def test_calls_come_back_as_they_were_written(
    store: Store, claim: Claim, writer: TraceWriter
) -> None:
    call = call_of(claim, "c1", response={"a": [1]}, response_logprobs=[-0.5])
    writer.open(replace(call, state=CallState.OPEN))
    assert await writer.finish(call) is AttemptState.RUNNING
    assert store.calls(attempt_ids=[claim.attempt_id]) == [call]
    accounting = store.accounting(claim.run_id)
    assert (accounting.proxied, accounting.recorded, accounting.pending) == (1, 1, 1)


async def test_a_late_call_is_kept_and_named(
    store: Store, claim: Claim, writer: TraceWriter
) -> None:
    writer.open(call_of(claim, "late", state=CallState.OPEN))
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    assert await writer.finish(call_of(claim, "late")) is AttemptState.SUCCEEDED
    assert store.accounting(claim.run_id).skipped == {SkipReason.LATE_CALL: 1}


async def test_calls_open_at_a_gateways_death_are_lost_with_a_reason(
    store: Store, claim: Claim, writer: TraceWriter
) -> None:
    writer.open(call_of(claim, "lost", state=CallState.OPEN, response_ids=[]))
    assert await writer.finish(call_of(claim, "done")) is AttemptState.RUNNING
    writer.close()
    assert store.register_gateway("second", claim.run_id, 2) == 1
    lost, done = sorted(store.calls(attempt_ids=[claim.attempt_id]), key=lambda c: c.id != "lost")
    assert (lost.state, lost.skip_reason) == (CallState.ERROR, SkipReason.GATEWAY_LOST)
    assert (done.state, done.skip_reason) == (CallState.COMPLETED, None)


async def test_a_gateway_takes_only_its_predecessors_calls_for_lost(store: Store) -> None:
    run_id = start_run(store, rollouts=3)
    for number, boot in enumerate(("0.a", "1.a", "2.a")):
        store.register_gateway(boot, run_id, 1, gateways=3)
        writer = TraceWriter(store, boot)
        writer.open(call_of(claimed(store), f"of-{number}", state=CallState.OPEN))
        writer.close()
    assert store.register_gateway("1.b", run_id, 2, gateways=3) == 1
    lost = [call for call in store.calls() if call.state is CallState.ERROR]
    assert [call.id for call in lost] == ["of-1"]
    assert store.register_gateway("1.c", run_id, 2, gateways=2) == 0
    assert store.register_gateway("0.b", run_id, 2, gateways=2) == 2  # resumed with two of three


async def test_a_failing_database_fails_the_call_not_the_writer(
    store: Store, claim: Claim, writer: TraceWriter
) -> None:
    with pytest.raises((sa.exc.StatementError, TypeError)):  # by driver
        await writer.finish(call_of(claim, "bad", params={"not json": object()}))
    assert await writer.finish(call_of(claim, "good")) is AttemptState.RUNNING


async def test_what_the_database_refuses_fails_alone(
    store: Store, claim: Claim, writer: TraceWriter
) -> None:
    commits: list[int] = []
    write_calls = store.write_calls
    busy = threading.Event()

    def watched(boot_id: str, opened: Any, finished: Any, *rest: Any, wait: bool = True) -> Any:
        if not wait:
            raise sa.exc.OperationalError("BEGIN", {}, Exception("another writer"))
        commits.append(len(finished))
        busy.wait(10)  # the calls that arrive meanwhile are one batch
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


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_a_turns_calls_are_one_commit_on_the_event_loop(
    store: Store, claim: Claim, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_tracer.store.writer._SLOW_S", 60)  # the machine may be busy
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
    # Another writer holds the lock: the thread waits for it, the event loop goes on.
    with store.db.write():
        waiting = asyncio.create_task(writer.finish(call_of(claim, "c")))
        for _ in range(10):
            await asyncio.sleep(0.02)
        assert not waiting.done()
    assert await waiting is AttemptState.RUNNING
    assert [name for name, _, _ in commits[1:]] == ["MainThread", "trace-writer"]
    # After many rows the thread commits, which checkpoints the log.
    for i in range(300):
        await writer.finish(call_of(claim, f"d{i}"))
    assert "trace-writer" in [name for name, _, _ in commits[3:]]
    writer.open(call_of(claim, "marked", state=CallState.OPEN))
    await asyncio.sleep(0.1)
    assert store.accounting(claim.run_id).recorded == 304


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_after_a_slow_commit_the_thread_writes(
    store: Store, claim: Claim, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    write_calls = store.write_calls

    def watched(*args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return write_calls(*args, **options)

    store.write_calls = watched
    monkeypatch.setattr("agentrl_tracer.store.writer._SLOW_S", 0)
    for name in ("a", "b"):
        assert await writer.finish(call_of(claim, name)) is AttemptState.RUNNING
    assert names == ["MainThread", "trace-writer"]
