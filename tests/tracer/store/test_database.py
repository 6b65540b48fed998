"""Schemas, migrations, and reads beside the connection that writes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from store_records import call_of, claimed, start_run

from agentrl_tracer.schemas import AttemptState, Claim
from agentrl_tracer.store import Store, database, tables

_OLD_CALLS = "".join(
    f"INSERT INTO calls (id, response_id, choice, run_id, seq, model, state, prompt_ids, "
    f"response_ids, response_logprobs, params, started_at, trained_step, skip_reason) "
    f"VALUES ('c{i}', 'c', 0, 'r', 0, 'm', 'completed', '', '', '', '{{}}', 0, {verdict});"
    for i, verdict in enumerate(("1, NULL", "2, NULL", "NULL, 'stale'", "NULL, NULL"))
)


def test_an_old_store_is_migrated_to_the_tables_of_a_new_one(tmp_path: Path) -> None:
    scripts = ScriptDirectory(str(Path(database.__file__).parent / "migrations"))
    assert scripts.get_current_head() == database.HEAD
    with closing(sqlite3.connect(tmp_path / "old.db")) as old:
        old.executescript(Path(__file__).with_name("schema_0001.sql").read_text())
        old.executescript(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);"
            "INSERT INTO alembic_version VALUES ('0001');" + _OLD_CALLS
        )
    for name in ("old.db", "new.db"):
        store = Store(str(tmp_path / name))
        with store.db.read() as connection:
            context = MigrationContext.configure(connection)
            assert compare_metadata(context, tables.metadata) == []
            assert context.get_current_revision() == database.HEAD
        assert len(store.runs()) == 0
        if name == "old.db":
            verified = store.verify("r")
            assert verified.kept == verified.counted
            assert (verified.kept.trained, verified.kept.skipped) == (2, {"stale": 1})
            assert verified.kept.pending == 1
        store.close()


def test_a_store_of_the_future_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    store = Store(path)
    with store.db.write() as c:
        c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(RuntimeError, match="upgrade agentrl"):
        Store(path)


def test_as_many_connections_stay_as_were_used_at_once(postgres: str) -> None:
    with closing(Store(postgres)) as store:
        with ExitStack() as used:
            for _ in range(12):
                used.enter_context(store.db.read())
        pool: Any = store.db.engine.pool
        assert pool.checkedin() >= 12


def test_the_writers_own_reads_are_of_now_and_leave_nothing_open(tmp_path: Path) -> None:
    """Lookups use the connection that writes, while other stores write and other threads read."""
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
    assert write(second, "b") is AttemptState.RUNNING  # the lookup left no old snapshot open
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


def test_to_open_a_store_again_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Without them, another process that ends deletes the write-ahead log that is in use."""
    path = tmp_path / "store.db"
    with closing(Store(str(path))) as first:
        run_id = start_run(first)
        Store(str(path)).close()
        other = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        other += "db.execute('SELECT * FROM runs').fetchall(); db.close()"
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        assert path.with_name("store.db-wal").is_file()
        first.end_run(run_id, "finished")
        with closing(sqlite3.connect(path)) as found:
            assert found.execute("SELECT state FROM runs").fetchall() == [("finished",)]
