"""The store's tests run on both databases: SQLite, and a real PostgreSQL from a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_tracer.store import Store, tables


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store. All tests share one PostgreSQL database: creating one takes half a second."""
    on_sqlite = request.param == "sqlite"
    url = str(tmp_path / "store.db") if on_sqlite else request.getfixturevalue("postgres")
    opened = Store(url)
    _empty(opened)
    yield opened
    _empty(opened)
    opened.close()


def _empty(store: Store) -> None:
    with store.db.write() as connection:
        for table in reversed(tables.metadata.sorted_tables):
            connection.execute(table.delete())
