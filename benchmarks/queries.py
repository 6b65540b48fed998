"""Count the statements that this process sends to PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from sqlalchemy import event

from agentrl_tracer.store import Store


class CountingCursor(psycopg.Cursor[Any]):
    """Counts what all cursors of the process send; BEGIN and COMMIT are not counted."""

    sent = 0

    def execute(self, query: Any, params: Any = None, **options: Any) -> CountingCursor:
        CountingCursor.sent += 1
        return super().execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        rows = list(params_seq)
        CountingCursor.sent += len(rows)
        super().executemany(query, rows, **options)


def count_queries(store: Store) -> None:
    """Have a store's connections count, from the next use of each."""

    def prepare(connection: psycopg.Connection[Any], *_: object) -> None:
        connection.cursor_factory = CountingCursor

    event.listen(store.db.engine, "checkout", prepare)
