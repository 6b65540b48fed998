"""Runs, their indexes, and stores beside the folders of runs: what was served, and PostgreSQL."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from store_records import call_of, claimed, enqueue, start_run
from ui_pages import fill_indexes, record_run, record_served

from agentrl.config.errors import ConfigError
from agentrl.history.index import Index, find_served
from agentrl.history.rollout_table import Query, beside_in_table, find_rollouts
from agentrl.history.sources import Sources
from agentrl.ui.app import create_app
from agentrl.ui.report import run_report
from agentrl_tracer.schemas import Feedback
from agentrl_tracer.store import Store, StoreError


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
        store.add_feedback(Feedback(run.id, ids["wrong"], None, "a=b", "a", score=0.25))
        store.cancel(run.id, "resumed", after_step=3)
        while run.fill():
            pass
        assert set(found("feedback > 0")) == {last, ids["wrong"]}
        [row] = find_rollouts(run.index, Query("rewards['human:quality'] = 0.5")).rows
        assert found("rewards['human:a=b'] = 0.25") == [ids["wrong"]]
        assert (row["id"], row["feedback"], row["rewards"]["human:quality"]) == (last, 3, 0.5)
        assert row["reward"] == row["rewards"]["correct"] + row["rewards"]["clarity"]
        assert found("reward == None") == found("reward is None") != []
        assert found("None != reward") == found("reward is not None") != []
        assert found("step in (2)") == found("step == 2") != []
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
        ("1 in step", "'step' is no list; write it as in"),
        ("step not in rewards.x", "'rewards.x' is no list; write it as in"),
        ("reward > __import__('os')", "is neither a column nor a number"),
        ("reward > -1j", "where: "),
        ("reward > 1e400 and task == 99999999999999999999", "where: "),
        ("not " * 1_500 + "reward > 1", "where: "),
        ("not " * 15_000 + "reward > 1", "where: is nested too deep"),
        ("agent == '\ud800'", "where: "),
    ],
)
def test_a_wrong_expression_is_named(tmp_path: Path, where: str, said: str) -> None:
    record_served(tmp_path / "serve.db", 0)
    with contextlib.closing(Sources(tmp_path)) as sources, pytest.raises(ConfigError, match=said):
        find_rollouts(sources.served("serve.db").index, Query(where))


@pytest.mark.parametrize("query", [Query(offset=2**70), Query(search="a\0b"), Query("task > -1j")])
def test_a_place_or_a_search_that_cannot_be_is_named(tmp_path: Path, query: Query) -> None:
    record_served(tmp_path / "serve.db", 0)
    with contextlib.closing(Sources(tmp_path)) as sources:
        served = sources.served("serve.db")
        with pytest.raises(ConfigError, match="where: "):
            beside_in_table(served.index, query, "r")
        with pytest.raises(ConfigError, match="search: "):
            find_served(served.store, served.index, "a\0b")


def test_a_folder_made_again_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    record_run(tmp_path, "one")
    with contextlib.closing(Sources(tmp_path)) as sources:
        first = sources.open("one")
        assert first.fill()
        shutil.rmtree(tmp_path / "one")
        record_run(tmp_path, "one")
        while first.fill():  # as the watcher may, before a page is opened
            pass
        again = sources.open("one")
        assert again.id != first.id
        while again.fill():
            pass
        held, there = again.index.progress()
        assert held == there > 0


def test_words_of_a_rollout_that_ended_by_cancellation_are_found(tmp_path: Path) -> None:
    with contextlib.closing(Store(str(tmp_path / "store.db"))) as store:
        run_id = start_run(store)
        claim = claimed(store)
        with contextlib.closing(Index(tmp_path / "view.db", store, run_id)) as index:
            index.fill()  # while it runs
            said = {"messages": [{"role": "user", "content": "a walrus"}]}
            store.write_calls("boot", [], [call_of(claim, "c", request=said)], 1)
            store.cancel(run_id, "resumed", after_step=0)
            enqueue(store, run_id, {"n": 8}, step=2)
            while index.fill():
                pass
            [row] = find_rollouts(index, Query(search="walrus")).rows
            assert (row["id"], row["status"]) == (claim.rollout_id, "cancelled")


@pytest.mark.parametrize("damaged", [True, False])
def test_an_index_that_cannot_be_written_is_named(tmp_path: Path, damaged: bool) -> None:
    record_run(tmp_path, "one")
    index = tmp_path / "one" / "view.db"
    index.write_bytes(b"no database" * 1_000) if damaged else index.mkdir()
    with TestClient(create_app(tmp_path)) as client:
        page = client.get("/runs/one/rollouts")
        assert (page.status_code, "must find room and be allowed" in page.text) == (503, True)
    with pytest.raises(StoreError, match=r"view\.db: .*; this user must find room"):
        run_report(tmp_path / "one")


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
        with contextlib.closing(Index(served.index.path, served.store, None)) as other:
            other._write([], first)  # as of another `agentrl ui` that began with the same calls
        assert served.index.progress() == (120, 120)
        assert len(find_served(served.store, served.index, "number 77")) == 1


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
