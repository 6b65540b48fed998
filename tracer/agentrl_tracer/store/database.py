"""Open the database: URLs, pragmas, transactions, migrations.

SQLite runs in WAL mode with ``synchronous=NORMAL``: a committed transaction survives the death of
any process (``kill -9``), but the last few may be lost when the machine loses power.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from agentrl_tracer.store.faults import PATIENCE_S, StoreError, Waiting, patiently
from agentrl_tracer.store.statements import (
    AnySelect,
    CompiledStatement,
    json_text,
    json_value,
    upsert,
    where_among,
)
from agentrl_tracer.store.tables import metadata

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

_BEGIN = "agentrl_begin"  # execution option: how an SQLite transaction begins
_BUSY_MS = 5_000  # how long SQLite waits for a lock before it says so
_TURN_S = 1.0  # between looks at a turn that does not come
_CONNECT = {  # a server that is gone without a word is noticed within a minute
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

HEAD = "0006"  # the newest migration; a test compares it with the scripts


def open_engine(url: str, *, read_only: bool = False) -> sa.Engine:
    """Return an engine, without connecting; the database refuses writes of a read-only one.

    A forked child must neither use nor close a connection that it inherits.

    Raises:
        StoreError: the URL is wrong, or the database's driver is not installed.
    """
    how: dict[str, Any] = {"json_serializer": json_text, "json_deserializer": json_value}
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
        if backend not in ("postgresql", "sqlite") or (backend == "sqlite" and "?" in url):
            raise ArgumentError(url)
        if backend == "postgresql":
            wanted: dict[str, Any] = {k: v for k, v in _CONNECT.items() if k not in parsed.query}
            if read_only:
                wanted["options"] = "-c default_transaction_read_only=on"
            how |= {"pool_pre_ping": True, "pool_size": 16}  # with 5, others open again and again
            return sa.create_engine(url, connect_args=wanted, **how)
        engine = sa.create_engine(url, connect_args={"check_same_thread": False}, **how)
    except ModuleNotFoundError as error:
        needs = f"PostgreSQL needs {error.name}, which is not installed"
        raise StoreError(f"store: {needs}: pip install 'psycopg[binary]'") from error
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        known = "a path without '?', or a URL like postgresql://user@host/database"
        raise StoreError(f"store: must be {known}") from error

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # _begin says BEGIN
        for pragma in (
            f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"
        ):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")
        if read_only:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction that reads first and
        # writes later fails with "database is locked" instead of waiting its turn.
        if how := connection.get_execution_options().get(_BEGIN, "BEGIN IMMEDIATE"):
            connection.exec_driver_sql(how)

    return engine


class Database:
    """An engine and the ways to use it.

    Args:
        patience_s: how long ``execute``, ``fetch``, ``look_up``, ``transact`` and ``snapshot`` wait
            for a database that is away.
        read_only: refuse writes, once the schema is this version's.
    """

    def __init__(
        self, url: str, *, patience_s: float = PATIENCE_S, read_only: bool = False
    ) -> None:
        if "://" not in url:  # a path
            url = f"sqlite:///{Path(url).absolute()}"
        if url.startswith(("postgres://", "postgresql://")):
            url = "postgresql+psycopg://" + url.partition("://")[2]
        self.url, self.patience_s = url, patience_s
        self.engine = open_engine(url)
        self.is_remote = not self.url.startswith("sqlite")
        self.upsert = partial(upsert, self.is_remote)
        self.name = self.engine.url.render_as_string()  # without its password
        file = None if self.is_remote else self.engine.url.database
        # PostgreSQL queues writers itself, and Windows has no flock.
        self._queue = f"{file}-queue" if file and sys.platform != "win32" else None
        self._compiled: dict[sa.Executable, CompiledStatement] = {}
        self._no_wait: Any = None  # a connection that never waits for a lock
        self._no_wait_thread = 0  # the only thread that may use it
        try:
            self.patiently(partial(self._migrate, file))
        except BaseException:
            self.engine.dispose()
            raise
        if read_only:
            self.engine.dispose()
            self.engine = open_engine(url, read_only=True)

    def patiently(self, action: Callable[[], T]) -> T:
        """Repeat ``action``, a whole transaction, while the database is away; see ``faults``."""
        return patiently(self.name, self.patience_s, action)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Admit the writers of an SQLite file one by one, by ``flock`` on a file beside it.

        SQLite's own waiting polls at intervals of up to 100 ms, so with dozens of runners some
        slept through a second of free locks; the kernel wakes waiters at once. A lock whose holder
        dies is released.
        """
        if self._queue is None:
            yield
            return
        # Opened for each turn: flock tells open files apart, not threads.
        file = os.open(self._queue, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(file)
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may keep the file open
            os.close(file)

    def _lock(self, file: int) -> None:
        """Take the lock, and say so if that takes long: its holder may be stopped."""
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not self.patience_s:  # of a worker, which forks and has no threads
            fcntl.flock(file, fcntl.LOCK_EX)
            return
        waiting = Waiting(self.name, self.patience_s)
        thread = threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX), daemon=True)
        thread.start()
        thread.join(_TURN_S)
        while thread.is_alive():
            waiting.still("another process holds its lock, or is stopped with it")
            thread.join(_TURN_S)
        waiting.over()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction that holds the write lock; it fails if the database is away."""
        with self._turn(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Single statements outside any transaction, which never wait for a writer."""
        options = {"isolation_level": "AUTOCOMMIT"} if self.is_remote else {_BEGIN: ""}
        with self.engine.connect() as connection:
            yield connection.execution_options(**options)

    def execute(self, statement: sa.Executable, rows: Any = None) -> int:
        """Execute one statement in a transaction of its own; return how many rows it changed.

        Done twice, it must come out the same.
        """
        return self.transact(lambda c: cast(Any, c.execute(statement, rows)).rowcount)

    def transact(self, work: Callable[[sa.Connection], T]) -> T:
        """Do ``work`` in one transaction that holds the write lock, when the database is there.

        The answer to a commit may get lost: done twice, it must come out the same.
        """

        def attempt() -> T:
            with self.write() as connection:
                return work(connection)

        return self.patiently(attempt)

    def snapshot(self, work: Callable[[sa.Connection], T]) -> T:
        """Read several things as of one moment, without keeping a writer waiting."""
        level = {"isolation_level": "REPEATABLE READ"} if self.is_remote else {_BEGIN: "BEGIN"}

        def attempt() -> T:
            with self.engine.connect().execution_options(**level) as connection:
                return work(connection)

        return self.patiently(attempt)

    def among(self, column: sa.Column[Any], ids: Collection[str]) -> sa.ColumnElement[bool]:
        """Build ``column IN ids``, as one parameter: PostgreSQL takes 65,535 at most."""
        if self.is_remote:
            values = sa.bindparam(None, list(ids), type_=postgresql.ARRAY(sa.Text))
            return column == sa.func.any(values)
        listed = sa.func.json_each(json_text(list(ids))).table_valued("value")
        return column.in_(sa.select(listed.c.value))

    def fetch(self, query: sa.Executable, parameters: Any = None) -> Sequence[sa.RowMapping]:
        """Return all rows of one query, by column."""
        return [row._mapping for row in self.fetch_rows(query, parameters)]

    def fetch_rows(self, query: sa.Executable, parameters: Any = None) -> Sequence[Any]:
        """Return all rows of one query."""

        def attempt() -> Sequence[Any]:
            with self.read() as connection:
                return connection.execute(query, parameters).all()

        return self.patiently(attempt)

    def look_up(self, statement: sa.Select[Any], **parameters: str) -> Any:
        """Return the first value of a select, or None; for lookups on every request.

        It goes straight to the driver: 8 us, where SQLAlchemy's connection and result take 50. So
        parameters and value have the driver's own types.
        """
        compiled = self.compiled(statement, tuple(parameters))
        row = tuple(parameters.values())
        if self._no_wait is not None and threading.get_ident() == self._no_wait_thread:
            # After another connection's commit SQLite drops its cache: the connection that wrote
            # last reads in 6 us, one of the pool in 40.
            with suppress(self.engine.dialect.loaded_dbapi.OperationalError):
                return compiled.first_value(self._no_wait, row)

        def attempt() -> Any:
            with self._driver_connection() as connection:
                return compiled.first_value(connection, row)

        return self.patiently(attempt)

    def compiled(self, statement: sa.Executable, names: Sequence[str]) -> CompiledStatement:
        """Return a statement for ``write_hot``, compiled once."""
        known = self._compiled.get(statement)
        if known is None:
            known = CompiledStatement(statement, names, self.engine.dialect)
            self._compiled[statement] = known
        return known

    def insert_records(self, cursor: Any, table: sa.Table, records: Sequence[Any]) -> None:
        """Insert dataclasses whose fields are the table's columns; rows that exist stay."""
        if records:
            names = tuple(records[0].__dataclass_fields__)
            self.insert_rows(cursor, table, names, map(attrgetter(*names), records))

    def insert_rows(
        self, cursor: Any, table: sa.Table, names: tuple[str, ...], rows: Any,
        update: tuple[str, ...] = (), keep: tuple[str, ...] = (), add: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Upsert rows, with the cursor of ``write_hot``."""
        insert = self.compiled(self.upsert(table, update, keep, add), names)
        cursor.executemany(insert.sql, [insert.parameters(row) for row in rows])

    def select_among(
        self, cursor: Any, select: AnySelect, column: sa.Column[str], ids: Collection[str]
    ) -> list[Any]:
        """Return the rows whose ``column`` is one of ``ids``, with the cursor of ``write_hot``."""
        size = 1 << (len(ids) - 1).bit_length()  # one statement each for 1, 2, 4, 8, ...
        names = [f"id{i}" for i in range(size)]
        compiled = self.compiled(where_among(select, column, size), names)
        cursor.execute(compiled.sql, compiled.parameters([*ids, *[None] * (size - len(ids))]))
        return cursor.fetchall()

    @contextmanager
    def write_hot(self, *, wait: bool = True) -> Iterator[Any]:
        """One transaction that holds the write lock, as a cursor of the driver.

        Args:
            wait: False, with SQLite: raise the driver's OperationalError at once if another writer
                holds the lock, and leave checkpoints of the log to others. For one thread only.
        """
        with ExitStack() as held:
            if wait:
                connection = held.enter_context(self._driver_connection())
                held.enter_context(self._turn())
            else:
                connection = self._no_wait = self._no_wait or self._open_no_wait()
            cursor = connection.cursor()
            try:
                if not self.is_remote:  # psycopg begins by itself
                    cursor.execute("BEGIN IMMEDIATE")
                yield cursor
                connection.commit()
            except BaseException:
                with suppress(Exception):  # the first error is the one to report
                    connection.rollback()
                raise

    @contextmanager
    def _driver_connection(self) -> Iterator[Any]:
        """Lend a connection of the pool, which drops it if it breaks."""
        with closing(self.engine.raw_connection()) as connection:
            try:
                yield connection
            except BaseException:
                try:
                    connection.rollback()
                except Exception:
                    connection.invalidate()
                raise

    def _open_no_wait(self) -> Any:
        connection = self.engine.raw_connection()
        connection.detach()  # from the pool, whose connections wait
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        self._no_wait_thread = threading.get_ident()
        return connection

    def close(self) -> None:
        if self._no_wait is not None:
            self._no_wait.close()
            self._no_wait = None
        self.engine.dispose()

    def _migrate(self, file: str | None) -> None:
        """Bring the schema to ``HEAD``; a new file gets its folder."""
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            # Never open a file that exists: closing it drops this process's locks on it.
            with suppress(OSError):  # SQLite says what is wrong; its log gets the same mode
                Path(file).touch(0o600, exist_ok=False)
        with self.read() as connection:
            if _revision(connection) == HEAD:
                return  # usually: one query
        # IMMEDIATE: of processes that open a new store at once, one migrates and the others wait.
        with self.engine.begin() as connection:
            if self.is_remote:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(727274)"))
            revision = _revision(connection)
            if revision is None:
                # A new store is made from the tables, without importing alembic (0.3 s). A test
                # holds tables and migrations together.
                metadata.create_all(connection)
                _VERSION.create(connection)
                connection.execute(_VERSION.insert().values(version_num=HEAD))
            elif revision != HEAD:
                _upgrade(connection, revision)


_VERSION = sa.Table(  # as alembic defines it
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def _upgrade(connection: sa.Connection, revision: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        url = connection.engine.url.render_as_string()
        raise RuntimeError(
            f"store {url!r} has schema {revision!r}, which this agentrl (schema {HEAD}) does not "
            "know: upgrade agentrl, or use another store"
        ) from error


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.select(_VERSION.c.version_num)).scalar()
