"""The trace store: one SQL database (SQLite by default, PostgreSQL for many machines)."""

from agentrl_tracer.store.store import Store

__all__ = ["Store"]
