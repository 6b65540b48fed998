"""Opening the database: URLs, pragmas, transactions, migrations.

SQLite runs in WAL mode with ``synchronous=NORMAL``: a committed transaction survives the death of
any process (``kill -9``), though the last few may be lost when the whole machine loses power.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from agentrl_tracer.store.compiled_statements import Hot, transaction
from agentrl_tracer.store.tables import metadata

if sys.platform != "win32":
    import fcntl

_ONE_READ = "agentrl_one_read"  # execution option: a single statement, without a transaction
_BUSY_MS = 30_000  # writers queue for the one write lock this long before giving up


def normalize_url(url: str) -> str:
    """A path means SQLite; ``postgres://`` means the psycopg 3 driver."""
    if "://" not in url:
        return f"sqlite:///{Path(url).absolute()}"
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


def open_engine(url: str, *, pooled: bool) -> sa.Engine:
    """An engine for ``url``; ``pooled=False`` keeps no connection open between transactions.

    A forked child must neither use nor close a connection it inherits. Where one might,
    open the store unpooled; runners keep their connection, since an attempt does neither.
    """
    pool: dict[str, Any] = {} if pooled else {"poolclass": NullPool}
    pool["json_serializer"] = json_text
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_pre_ping=pooled, **pool)
    file = sa.make_url(url).database
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"check_same_thread": False}, **pool)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        if connection.get_execution_options().get(_ONE_READ):
            return  # SQLAlchemy announces a transaction, SQLite needs none
        # IMMEDIATE: take the write lock at once. A deferred transaction that reads first and
        # writes later fails with "database is locked" instead of waiting its turn.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


class Turnstile:
    """Lets the writers of an SQLite file in one by one, each woken as soon as its turn comes.

    SQLite's own waiting sleeps and looks again, up to 100 ms at a time: with dozens of runners some
    slept through a second of free locks. Here the kernel wakes who waits (``flock`` on a file
    beside the database), and SQLite's lock is then free but for programs that are not ours. A lock
    whose holder dies, however, is free again.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = threading.Lock()  # flock tells processes apart, not threads
        self._opened: tuple[int, int] | None = None  # pid and descriptor: a fork opens its own

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._thread:
            fd = self._descriptor()
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _descriptor(self) -> int:
        pid = os.getpid()
        if self._opened is None or self._opened[0] != pid:
            self._opened = (pid, os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644))
        return self._opened[1]

    def close(self) -> None:
        with self._thread:
            if self._opened is not None and self._opened[0] == os.getpid():
                os.close(self._opened[1])
            self._opened = None


def _turnstile(url: str) -> Turnstile | None:
    """For SQLite files; a server has its own queue, and Windows no ``flock``."""
    file = sa.make_url(url).database if url.startswith("sqlite") else None
    return Turnstile(f"{file}-queue") if file and sys.platform != "win32" else None


def json_text(value: Any) -> str:
    """What a JSON column holds: the same text for the same value, in both databases."""
    try:
        return orjson.dumps(value).decode()  # eight times as fast
    except TypeError:  # integers beyond 64 bits, lone surrogates, very deep nesting
        return json.dumps(value)


class Database:
    """An engine and the ways to use it."""

    def __init__(self, url: str, *, pooled: bool = True) -> None:
        self.url = normalize_url(url)
        self.engine = open_engine(self.url, pooled=pooled)
        self.is_remote = not self.url.startswith("sqlite")
        self._turnstile = _turnstile(self.url)
        self._compiled: dict[sa.Select[Any], SQLCompiler] = {}
        self._hot: dict[Any, Hot] = {}
        self._impatient: Any = None  # a connection that waits for nobody
        self._impatient_thread = 0  # the only one that may use it
        migrate(self.engine)

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction holding the write lock; also the way to read several things at once."""
        with self._turn(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Single statements, outside any transaction, never waiting for a writer."""
        with _reading(self.engine) as connection:
            yield connection

    def look_up(self, statement: sa.Select[Any], **parameters: str) -> Any:
        """The first value that a select finds, or None: ``read`` for what every request asks.

        Straight to the driver: 8 us, of which SQLAlchemy's connection and result would make 50.
        So parameters and value are the driver's own types.
        """
        compiled = self._compiled.get(statement)
        if compiled is None:
            compiled = cast(SQLCompiler, statement.compile(dialect=self.engine.dialect))
            self._compiled[statement] = compiled
        values = compiled.construct_params(parameters)
        order = compiled.positiontup
        asked = values if order is None else [values[name] for name in order]
        if self._impatient is not None and threading.get_ident() == self._impatient_thread:
            # After a commit through another connection SQLite forgets all that it has cached: who
            # has just written reads in 6 us what a connection of the pool reads in 40.
            with suppress(self.engine.dialect.loaded_dbapi.OperationalError):
                return _first_value(self._impatient, compiled.string, asked)
        connection = self.engine.raw_connection()
        try:
            return _first_value(connection, compiled.string, asked)
        finally:
            connection.close()

    def hot(self, key: Any, make: Callable[[], sa.Executable], names: Sequence[str]) -> Hot:
        """A statement for ``write_hot``, made and compiled once for each key."""
        known = self._hot.get(key)
        if known is None:
            known = self._hot[key] = Hot(make(), names, self.engine.dialect)
        return known

    @contextmanager
    def write_hot(self, *, wait: bool = True) -> Iterator[Any]:
        """One transaction holding the write lock, as a cursor of the driver.

        Args:
            wait: False, with SQLite: raises the driver's OperationalError at once where somebody
                else is writing, and leaves it to others to move the log into the database. For
                one thread only.
        """
        if wait:
            connection = self.engine.raw_connection()
            try:
                with self._turn(), transaction(connection, self._begin) as cursor:
                    yield cursor
            finally:
                connection.close()
            return
        if self._impatient is None:
            connection = self.engine.raw_connection()
            connection.detach()  # the pool's connections are patient
            connection.execute("PRAGMA busy_timeout=0")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            self._impatient, self._impatient_thread = connection, threading.get_ident()
        with transaction(self._impatient, self._begin) as cursor:
            yield cursor

    def is_operational(self, error: Exception) -> bool:
        """Nobody's fault among those who write: a full disk, a lock, a lost connection."""
        driver: Any = self.engine.dialect.loaded_dbapi
        return isinstance(error, (OperationalError, driver.OperationalError))

    def _turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turnstile is None else self._turnstile.passing()

    @property
    def _begin(self) -> str | None:
        return None if self.is_remote else "BEGIN IMMEDIATE"  # psycopg begins by itself

    def close(self) -> None:
        if self._impatient is not None:
            self._impatient.close()
            self._impatient = None
        self.engine.dispose()
        if self._turnstile is not None:
            self._turnstile.close()


def _first_value(connection: Any, sql: str, parameters: Any) -> Any:
    cursor = connection.cursor()
    try:
        cursor.execute(sql, parameters)
        row = cursor.fetchone()
    finally:
        cursor.close()  # or the statement, and with it what it sees, would stay open
    return None if row is None else row[0]


HEAD = "0002"
"""The newest migration; a test compares it with the scripts."""

_VERSION = sa.Table(  # alembic's own, as it would make it
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def migrate(engine: sa.Engine) -> None:
    """Brings the schema to ``HEAD``.

    Raises:
        RuntimeError: the database was made by a newer agentrl.
    """
    with _reading(engine) as connection:
        if _revision(connection) == HEAD:
            return  # the usual case costs one query
    # One transaction, begun IMMEDIATE: of several processes that open a new store at the same
    # moment, one migrates and the others wait, then find nothing to do.
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(727274)"))
        revision = _revision(connection)
        if revision is None:
            # A new store: the tables as they are, without importing alembic (0.3 s). A test holds
            # tables and migrations together.
            metadata.create_all(connection)
            _VERSION.create(connection)
            connection.execute(_VERSION.insert().values(version_num=HEAD))
        elif revision != HEAD:
            upgrade(connection, revision)


def upgrade(connection: sa.Connection, revision: str | None) -> None:
    """Runs the migrations from ``revision`` (None: from an empty database) to ``HEAD``."""
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


@contextmanager
def _reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    remote = engine.dialect.name != "sqlite"
    options = {"isolation_level": "AUTOCOMMIT"} if remote else {_ONE_READ: True}
    with engine.connect() as connection:
        yield connection.execution_options(**options)


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.select(_VERSION.c.version_num)).scalar()
