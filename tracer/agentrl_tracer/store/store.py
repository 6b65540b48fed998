"""``Store``: everything that happened in a run, in one database.

Several processes use one store at the same time; every method is one transaction. All methods are
synchronous and thread-safe.
"""

from __future__ import annotations

from agentrl_tracer.store.calls import CallStore
from agentrl_tracer.store.database import Database
from agentrl_tracer.store.rollouts import RolloutStore
from agentrl_tracer.store.runs import RunStore


class Store(RunStore, RolloutStore, CallStore):
    """
    Args:
        url: a path (SQLite), or an SQLAlchemy URL such as ``postgresql://user@host/agentrl``.
        pooled: False keeps no connection open between transactions, for processes that fork.

    Raises:
        RuntimeError: the database was made by a newer agentrl.
    """

    def __init__(self, url: str, *, pooled: bool = True) -> None:
        self.db = Database(url, pooled=pooled)
        self.url = self.db.url
        self.is_remote = self.db.is_remote

    def close(self) -> None:
        self.db.close()
