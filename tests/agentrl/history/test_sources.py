"""Stores beside the folders of runs: what was served, and PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from call_records import make
from starlette.testclient import TestClient
from store_records import start_run

from agentrl.history.served import find_served
from agentrl.history.sources import Sources
from agentrl.ui.app import create_app
from agentrl_tracer.store import Store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record_served(store: Store, count: int) -> None:
    began = time.time() - 1000
    calls = [
        replace(
            make(f"call-{i}", [1], [2]), run_id=None, rollout_id=None, attempt_id=None,
            started_at=began + i, ended_at=began + i,
            request={"messages": [{"role": "user", "content": f"number {i}"}]},
        )
        for i in range(count)
    ]  # fmt: skip
    store.write_calls("boot", [], calls, count)


def test_served_calls_are_paged_newest_first_and_searched(tmp_path: Path) -> None:
    with contextlib.closing(Store(str(tmp_path / "serve.db"))) as store:
        record_served(store, 120)
    with contextlib.closing(Sources(tmp_path)) as sources:
        assert sources.served_names() == ["serve.db"]
        served = sources.served("serve.db")
        first = find_served(served.store, served.index)
        second = find_served(served.store, served.index, before=first.older)
        assert [call.id for call in first.calls[:2]] == ["call-119", "call-118"]
        assert second.calls[0].id == "call-69"
        while served.fill():
            pass
        found = find_served(served.store, served.index, "number 77")
        assert [call.id for call in found.calls] == ["call-77"]


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE calls (id)")
    before = (tmp_path / "other.db").read_bytes()
    assert Sources(tmp_path).served_names() == []
    assert TestClient(create_app(tmp_path)).get("/served/other.db").status_code == 404
    assert (tmp_path / "other.db").read_bytes() == before


def test_runs_of_a_postgresql_store_are_shown_without_their_folder(
    tmp_path: Path, postgres: str
) -> None:
    with contextlib.closing(Store(postgres)) as store:
        run_id = start_run(store)
        record_served(store, 3)
    with TestClient(create_app(tmp_path, [postgres])) as client:
        assert f"test~{run_id}" in client.get("/").text
        assert client.get(f"/runs/test~{run_id}").status_code == 200
        assert client.get(f"/runs/test~{run_id}/rollouts").status_code == 200
        name = "postgresql-local-postgres"
        assert "call-2" in client.get(f"/served/{name}").text
        form = {"call_id": "call-2", "author": "me", "name": "quality", "thumb": "down"}
        client.post(f"/served/{name}/feedback", data=form)
        assert '"thumb": -1' in client.get(f"/served/{name}/feedback.jsonl").text
    assert not list(tmp_path.glob("test~*"))
