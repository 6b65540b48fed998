"""Runs, their indexes, and stores beside the folders of runs: what was served, and PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from store_records import start_run
from ui_pages import fill_indexes, record_run, record_served

from agentrl.config.errors import ConfigError
from agentrl.history.index import find_served
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import Sources
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import Feedback
from agentrl_tracer.store import Store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_changes_after_a_rollout_has_ended_is_indexed(tmp_path: Path) -> None:
    ids = record_run(tmp_path, "one")
    fill_indexes(tmp_path)
    with contextlib.closing(Sources(tmp_path)) as sources, contextlib.closing(
        Store(str(tmp_path / "one" / "store.db"))
    ) as store:  # fmt: skip
        run = sources.open("one")

        def found(where: str) -> list[str]:
            return [row["id"] for row in find_rollouts(run.index, Query(where)).rows]

        assert found("feedback > 0") == found("status == 'cancelled'") == []
        before, last = run.index.signature(), ids["first"]
        for author, score in (("a", 1.0), ("b", -0.5), ("b", 0.0)):
            store.add_feedback(Feedback(run.id, last, None, "quality", author, score=score))
        store.add_feedback(Feedback(run.id, ids["wrong"], None, "tone", "a", comment="curt"))
        store.cancel(run.id, "resumed", after_step=3)
        while run.fill():
            pass
        assert set(found("feedback > 0")) == {last, ids["wrong"]}
        [row] = find_rollouts(run.index, Query("rewards['human:quality'] = 0.5")).rows
        assert (row["id"], row["feedback"], row["rewards"]["human:quality"]) == (last, 3, 0.5)
        assert row["reward"] == row["rewards"]["correct"] + row["rewards"]["clarity"]
        canceled = store.canceled_ids(run.id)
        assert sorted(found("status == 'cancelled'")) == sorted(canceled)
        assert find_rollouts(run.index, Query(search="17 comes after 16")).total == 50
        assert run.index.signature() == before  # nothing began or ended


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reward <", "is not understood"),
        ("wages > 1", "'wages' is no column; there are id, step"),
        ("reward", "compares nothing"),
        ("reward > -task", "is neither a column nor a number"),
        ("reward > __import__('os')", "is neither a column nor a number"),
    ],
)
def test_a_wrong_expression_is_named(tmp_path: Path, where: str, said: str) -> None:
    record_served(tmp_path / "serve.db", 0)
    with contextlib.closing(Sources(tmp_path)) as sources, pytest.raises(ConfigError, match=said):
        find_rollouts(sources.served("serve.db").index, Query(where))


def test_served_calls_are_paged_newest_first_and_searched(tmp_path: Path) -> None:
    record_served(tmp_path / "serve.db", 120)
    with contextlib.closing(Sources(tmp_path)) as sources:
        assert sources.served_names() == ["serve.db"]
        served = sources.served("serve.db")
        first = find_served(served.store, served.index)
        assert [call.id for call in first[:2]] == ["call-119", "call-118"]
        assert find_served(served.store, served.index, before=first[-1].id)[0].id == "call-69"
        while served.fill():
            pass
        assert served.index.progress() == (120, 120)
        found = find_served(served.store, served.index, "number 77")
        assert [call.id for call in found] == ["call-77"]


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
    record_served(postgres, 3)
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
