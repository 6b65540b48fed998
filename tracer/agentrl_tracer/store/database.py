"""Open the database: URLs, pragmas, transactions, statements, migrations.

SQLite runs in WAL mode with ``synchronous=NORMAL``: a committed transaction survives the death of
any process (``kill -9``), but the last few may be lost when the machine loses power.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from agentrl_tracer.store.tables import metadata

if sys.platform != "win32":
    import fcntl

_ONE_READ = "agentrl_one_read"  # execution option: a single statement, without a transaction
_BUSY_MS = 30_000  # how long a writer waits for SQLite's write lock

HEAD = "0003"  # the newest migration; a test compares it with the scripts


def json_text(value: Any) -> str:
    """Serialize for a JSON column: the same text for the same value in both databases."""
    try:
        return orjson.dumps(value).decode()  # eight times as fast as json
    except TypeError:  # integers beyond 64 bits, lone surrogates, very deep nesting
        return json.dumps(value)


def open_engine(url: str, *, pooled: bool) -> sa.Engine:
    """Return an engine; ``pooled=False`` keeps no connection open between transactions.

    A forked child must neither use nor close a connection that it inherits. Open the store
    unpooled where one might; runners keep their connection, since an attempt does neither.
    """
    options: dict[str, Any] = {"json_serializer": json_text}
    if not pooled:
        options["poolclass"] = NullPool
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_pre_ping=pooled, **options)
    file = sa.make_url(url).database
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"check_same_thread": False}, **options)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # _begin says BEGIN
        for pragma in (
            f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"
        ):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction that reads first and
        # writes later fails with "database is locked" instead of waiting its turn.
        if not connection.get_execution_options().get(_ONE_READ):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


@cache  # building a statement costs several times as much as executing it
def upsert(
    is_postgres: bool, table: sa.Table, update: tuple[str, ...] = (), keep: tuple[str, ...] = ()
) -> sa.Executable:
    """Build INSERT … ON CONFLICT on the primary key.

    An existing row gets the new ``update`` columns, and the new ``keep`` columns where it has
    nulls. With neither, it stays as it is.
    """
    insert: Any = postgresql.insert(table) if is_postgres else sqlite.insert(table)
    key = list(table.primary_key.columns)
    changes: dict[str, Any] = {name: insert.excluded[name] for name in update}
    changes |= {name: sa.func.coalesce(table.c[name], insert.excluded[name]) for name in keep}
    if not changes:
        return insert.on_conflict_do_nothing(index_elements=key)
    return insert.on_conflict_do_update(index_elements=key, set_=changes)


class CompiledStatement:
    """One statement, compiled for one database.

    Through SQLAlchemy a group commit of one call costs 215 us of CPU; with compiled statements it
    costs 92, most of it SQLite's own.

    Args:
        names: the parameters, in the order in which rows give their values.
    """

    def __init__(self, statement: sa.Executable, names: Sequence[str], dialect: Any) -> None:
        element = cast(sa.ClauseElement, statement)
        columns = list(names) if isinstance(statement, sa.Insert) else None
        compiled = cast(SQLCompiler, element.compile(dialect=dialect, column_keys=columns))
        assert set(compiled.binds) == set(names), (set(compiled.binds), names)
        self.sql = compiled.string
        self._names = tuple(names)
        # SQLite takes parameters by position, psycopg by name.
        order = compiled.positiontup
        self._order = None if order is None else [names.index(name) for name in order]
        if self._order == list(range(len(names))):
            self._order = []  # already in order
        kinds: list[Any] = [compiled.binds[name].type.dialect_impl(dialect) for name in names]
        processors = [kind.bind_processor(dialect) for kind in kinds]
        self._processors = [(i, process) for i, process in enumerate(processors) if process]

    def parameters(self, row: Sequence[Any]) -> Any:
        """Convert a row to the driver's parameters."""
        values = list(row)
        for i, process in self._processors:
            values[i] = process(values[i])
        if self._order is None:
            return dict(zip(self._names, values, strict=True))
        return [values[i] for i in self._order] if self._order else values

    def first_value(self, connection: Any, row: Sequence[Any]) -> Any:
        """Execute a select on a driver's connection; return its first value, or None."""
        # Closed: an open statement would keep reading the present snapshot.
        with closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, self.parameters(row))
            found = cursor.fetchone()
        return None if found is None else found[0]


class Database:
    """An engine and the ways to use it."""

    def __init__(self, url: str, *, pooled: bool = True) -> None:
        if "://" not in url:  # a path
            url = f"sqlite:///{Path(url).absolute()}"
        if url.startswith(("postgres://", "postgresql://")):
            url = "postgresql+psycopg://" + url.partition("://")[2]
        self.url = url
        self.engine = open_engine(url, pooled=pooled)
        self.is_remote = not self.url.startswith("sqlite")
        self.upsert = partial(upsert, self.is_remote)
        file = None if self.is_remote else self.engine.url.database
        # PostgreSQL queues writers itself, and Windows has no flock.
        self._queue = f"{file}-queue" if file and sys.platform != "win32" else None
        self._compiled: dict[sa.Executable, CompiledStatement] = {}
        self._no_wait: Any = None  # a connection that never waits for a lock
        self._no_wait_thread = 0  # the only thread that may use it
        self._migrate()

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
        file = os.open(self._queue, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may keep the file open
            os.close(file)

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction that holds the write lock; also for consistent reads of several kinds."""
        with self._turn(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Single statements outside any transaction, which never wait for a writer."""
        options = {"isolation_level": "AUTOCOMMIT"} if self.is_remote else {_ONE_READ: True}
        with self.engine.connect() as connection:
            yield connection.execution_options(**options)

    def execute(self, statement: sa.Executable, rows: Any = None) -> int:
        """Execute one statement in a transaction of its own; return how many rows it changed."""
        with self.write() as connection:
            return cast(Any, connection.execute(statement, rows)).rowcount

    def fetch(self, query: sa.Executable, parameters: Any = None) -> Sequence[sa.RowMapping]:
        """Return all rows of one query."""
        with self.read() as connection:
            return connection.execute(query, parameters).mappings().all()

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
        with closing(self.engine.raw_connection()) as connection:
            return compiled.first_value(connection, row)

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
        update: tuple[str, ...] = (), keep: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Upsert rows, with the cursor of ``write_hot``."""
        insert = self.compiled(self.upsert(table, update, keep), names)
        cursor.executemany(insert.sql, [insert.parameters(row) for row in rows])

    @contextmanager
    def write_hot(self, *, wait: bool = True) -> Iterator[Any]:
        """One transaction that holds the write lock, as a cursor of the driver.

        Args:
            wait: False, with SQLite: raise the driver's OperationalError at once if another writer
                holds the lock, and leave checkpoints of the log to others. For one thread only.
        """
        with ExitStack() as held:
            if wait:
                connection = held.enter_context(closing(self.engine.raw_connection()))
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

    def _open_no_wait(self) -> Any:
        connection = self.engine.raw_connection()
        connection.detach()  # from the pool, whose connections wait
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        self._no_wait_thread = threading.get_ident()
        return connection

    def is_operational(self, error: Exception) -> bool:
        """Whether the database failed, not the data: a full disk, a lock, a lost connection."""
        driver: Any = self.engine.dialect.loaded_dbapi
        return isinstance(error, (OperationalError, driver.OperationalError))

    def close(self) -> None:
        if self._no_wait is not None:
            self._no_wait.close()
            self._no_wait = None
        self.engine.dispose()

    def _migrate(self) -> None:
        """Bring the schema to ``HEAD``."""
        with self.read() as connection:
            if _revision(connection) == HEAD:
                return  # usually: one query
        # One IMMEDIATE transaction: when several processes open a new store at the same moment,
        # one migrates, and the others wait and find nothing to do.
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
