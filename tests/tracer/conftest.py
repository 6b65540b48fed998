"""The store's tests run on both databases: SQLite, and a real PostgreSQL from a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from agentrl_tracer.store import Store
from agentrl_tracer.store.database import normalize_url


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        url = str(tmp_path / "store.db")
    else:
        admin = sa.create_engine(
            normalize_url(request.getfixturevalue("postgres")), isolation_level="AUTOCOMMIT"
        )
        name = f"t{abs(hash(request.node.nodeid))}"
        with admin.connect() as c:
            c.execute(sa.text(f"CREATE DATABASE {name}"))
        url = str(admin.url.set(database=name).render_as_string(hide_password=False))
        admin.dispose()
    opened = Store(url)
    yield opened
    opened.close()
