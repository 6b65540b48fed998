"""Keep everything that happened in a run in one SQL database: SQLite, or PostgreSQL."""

from __future__ import annotations

from agentrl_tracer.store.calls import CallStore
from agentrl_tracer.store.database import Database
from agentrl_tracer.store.faults import PATIENCE_S, StoreError
from agentrl_tracer.store.leases import LeaseStore
from agentrl_tracer.store.runs import RunStore

__all__ = ["Store", "StoreError"]


class Store(RunStore, LeaseStore, CallStore):
    """The trace store. Every method is one transaction, synchronous and thread-safe.

    Several processes may use one store at the same time.

    Args:
        url: a path (SQLite), or an SQLAlchemy URL such as ``postgresql://user@host/agentrl``.
        patience_s: how long a method waits for a database that is away. The log says so.
        read_only: the database refuses what would change it.

    Raises:
        StoreError: the database is away for longer, or cannot be used; says what to do. Methods
            raise it, too.
        RuntimeError: the database was made by a newer agentrl.
    """

    def __init__(
        self, url: str, *, patience_s: float = PATIENCE_S, read_only: bool = False
    ) -> None:
        self.db = Database(url, patience_s=patience_s, read_only=read_only)
        self.url = self.db.url
        self.is_remote = self.db.is_remote

    def close(self) -> None:
        self.db.close()
