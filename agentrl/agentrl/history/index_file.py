"""Keep an index in an SQLite file of its own, which can be deleted at any time."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar


class IndexFile:
    """A file of ``layout``, made anew where it has another ``version``.

    Any thread may read; one writes.
    """

    layout: ClassVar[str]
    version: ClassVar[int]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection of its own to read with; columns by name."""
        self.prepare()
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only=ON")
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection that writes, for one transaction."""
        with self._lock:
            db = self.prepare()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise

    def prepare(self) -> sqlite3.Connection:
        """Return the connection that writes, with the layout in place."""
        with self._lock:
            if self._writer is not None and self.path.exists():  # else it was pruned
                return self._writer
            db = self._connect()
            if db.execute("PRAGMA user_version").fetchone()[0] not in (0, self.version):
                db.close()
                self.path.unlink()
                db = self._connect()
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")  # it can be made again
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                db.executescript(f"{self.layout} PRAGMA user_version = {self.version};")
            self._writer = db
            return db

    def close(self) -> None:
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
