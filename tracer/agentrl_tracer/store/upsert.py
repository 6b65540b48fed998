"""INSERT … ON CONFLICT on the primary key, for both databases."""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from agentrl_tracer.store.database import Database


def upsert(
    db: Database, table: sa.Table, update: tuple[str, ...], keep: tuple[str, ...] = ()
) -> sa.Executable:
    """Overwrites the ``update`` columns of an existing row; ``keep`` ones only where they are null.

    With neither, an existing row is left as it is.
    """
    return _upsert(db.is_remote, table, update, keep)


@cache  # building one costs several times as much as executing it
def _upsert(
    is_postgres: bool, table: sa.Table, update: tuple[str, ...], keep: tuple[str, ...]
) -> sa.Executable:
    insert: Any = postgresql.insert(table) if is_postgres else sqlite.insert(table)
    key = list(table.primary_key.columns)
    changes: dict[str, Any] = {name: insert.excluded[name] for name in update}
    changes |= {name: sa.func.coalesce(table.c[name], insert.excluded[name]) for name in keep}
    if not changes:
        return insert.on_conflict_do_nothing(index_elements=key)
    return insert.on_conflict_do_update(index_elements=key, set_=changes)
