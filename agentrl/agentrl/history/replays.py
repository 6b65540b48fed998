"""Recorded replays of a run's calls; ``gateway.on_demand`` makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Call
from agentrl_tracer.store import Store
from agentrl_tracer.store import tables as t

_LOOKED_AT = 1000  # newest replays


def replays_of(folder: RunFolder, call_id: str, most: int = 20) -> list[Call]:
    """Return the newest replays of a call, newest first."""
    query = sa.select(t.calls.c.id, t.calls.c.params).order_by(t.calls.c.started_at.desc())
    with _store(folder) as store:
        if store is None:
            return []
        rows = store.db.fetch(query.limit(_LOOKED_AT))
        ids = [row["id"] for row in rows if row["params"].get("request_id") == call_id[:64]]
        return [call for call in map(store.call, ids[:most]) if call is not None]


def replay(folder: RunFolder, call_id: str) -> Call | None:
    """Return a replay by its own id."""
    with _store(folder) as store:
        return None if store is None else store.call(call_id)


@contextlib.contextmanager
def _store(folder: RunFolder) -> Iterator[Store | None]:
    path = folder.root / "replays.db"
    if not path.is_file():
        yield None
        return
    with contextlib.closing(Store(str(path), read_only=True)) as store:
        yield store
