"""Fixtures: a store on both databases, and an agent's process inside a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from otlp_collector import Collector
from store_records import claimed, start_run

from agentrl_tracer import tracing
from agentrl_tracer.schemas import Claim
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


@pytest.fixture
def claim(store: Store) -> Claim:
    """The attempt of a run's only rollout, with the gateway "boot"."""
    run_id = start_run(store)
    store.register_gateway("boot", run_id, 1)
    return claimed(store)


def _empty(store: Store) -> None:
    with store.db.write() as connection:
        for table in reversed(tables.metadata.sorted_tables):
            connection.execute(table.delete())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """The gateway's OTLP side; the environment says that this process runs a rollout."""
    with closing(Collector()) as server:
        for name, value in {
            "AGENTRL_ROLLOUT_ID": "r1",
            "AGENTRL_ATTEMPT_ID": "a1",
            "AGENTRL_GATEWAY": server.url,
            "AGENTRL_KEY": "secret",
            "TRACEPARENT": f"00-{'ab' * 16}-{'cd' * 8}-01",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tracing, "_active", None)
        yield server
        if tracing._active is not None:
            tracing._active.batch.shutdown()
