"""The list of runs, one run's page, its books and calls."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from ui_pages import Recorded, begun, fill_indexes, record_run

from agentrl.history.sources import open_run
from agentrl.runs.circumstances import note_failure, note_start
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store
from agentrl.ui import watcher as watching
from agentrl.ui.app import create_app
from agentrl_tracer.store import Store


def _charts(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return {chart["id"]: chart for chart in map(json.loads, found)}


@pytest.fixture
def own(tmp_path: Path) -> Recorded:
    """A run that the test may change."""
    record_run(tmp_path, "mine")
    return Recorded(tmp_path, "mine")


def test_overview_has_the_figures_of_the_run(client: TestClient, recorded: Recorded) -> None:
    text = client.get(recorded.run).text
    charts = _charts(text)
    assert [row[0] for row in charts["reward"]["rows"]] == [1, 2, 3, 4]
    assert all(low < mean < high for _, mean, low, high in charts["reward"]["rows"])
    assert all(0 <= low <= rate <= high <= 1 for _, rate, low, high in charts["held-out"]["rows"])
    assert {"length", "entropy", "clip", "learning-rate", "speed", "phases"} <= charts.keys()
    assert charts["cores"]["rows"] == [["start", 0.5], ["rollouts", 0.9]]
    lanes = list(dict.fromkeys(row[0] for row in charts["timeline"]["rows"]))
    assert lanes == ["rollouts", "update", "checkpoint", "publish", "evaluation"]
    assert min(row[2] for row in charts["timeline"]["rows"]) == 0
    assert "it adds up" in text
    assert "<img" not in text  # the failed rollout's error is hostile


def test_shares_of_time_are_of_all_steps_of_a_long_run(tmp_path: Path) -> None:
    with begun(tmp_path, "long", "train") as (store, run_id):
        for step in range(1, 1001):
            seconds = {"seconds/update": 1.0} | (
                {"seconds/evaluation": 30.0} if step % 10 == 0 else {}
            )
            store.log_metrics(run_id, step, seconds)
    with TestClient(create_app(tmp_path)) as client:
        charts = _charts(client.get("/runs/long").text)
    assert [row[1] for row in charts["phases"]["rows"] if row[1]] == [0.25, 0.75]


def test_overview_of_a_run_that_is_not_indexed_yet_says_so_and_follows(
    own: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_PERIOD_S", 600.0)
    with TestClient(create_app(own.root)) as client:
        text = client.get("/runs/mine").text
        there = re.search(r"none indexed yet; indexed so far: 0 of (\d+)\.", text)
        assert there is not None
        assert 'sse-connect="/runs/mine/live?seen="' in client.get("/runs/mine/rollouts").text
        fill_indexes(own.root)
        assert f"{there[1]} completed</a>." in client.get("/runs/mine").text
        assert "sse-connect" not in client.get("/runs/mine/rollouts").text


def test_every_bar_of_the_books_leads_to_its_calls(client: TestClient, recorded: Recorded) -> None:
    text = client.get(recorded.run).text
    ends = [(to, amount) for _, to, amount in _charts(text)["books"]["rows"][1:]]
    assert {"trained", "evaluation", "failed_rollout", "other_agent"} <= {
        to["text"] for to, _ in ends
    }
    for to, amount in ends:
        assert f'<a href="{to["href"]}">{to["text"]}</a>' in text  # in the table, too
        seen, at = list[str](), to["href"]
        while at:
            shown = client.get(at).text
            seen += re.findall(r'href="([^"]+#call-[^"]+)"', shown)
            more = re.search(r'rel="next" href="([^"]+)"', shown)
            at = html.unescape(to["href"].split("?")[0] + more[1]) if more else ""
        assert len(seen) == len(set(seen)) == amount
    for query, field in (("verdict=nonsense", "verdict"), ("before=x.y", "before")):
        answer = client.get(f"{recorded.run}/calls?{query}")
        assert (answer.status_code, f"{field}: " in answer.text) == (404, True)


def test_runs_are_filtered_by_text_state_and_tag_and_archived(own: Recorded) -> None:
    record_run(own.root, "second")
    with TestClient(create_app(own.root)) as client:
        saved = client.post(
            "/runs/mine/notes", data={"tags": "best, <b>,best", "note": "<b>\r\nrank 8"}
        )
        assert saved.history[0].headers["location"] == "/runs/mine"
        assert 'value="best, &lt;b&gt;"' in saved.text
        assert "&lt;b&gt;\nrank 8</textarea>" in saved.text
        for query, names in (
            ("", ["second", "mine"]),
            ("text=RANK", ["mine"]),
            ("text=sec", ["second"]),
            ("tag=best", ["mine"]),
            ("state=failed", []),
            ("state=finished", ["second", "mine"]),
        ):
            text = client.get(f"/?{query}").text
            assert re.findall(r'<td><a href="/runs/([^"/]+)"', text) == names
        listed = client.post("/runs/mine/notes", data={"archived": "1", "run": "mine"}).text
        assert 'href="/runs/mine"' not in listed
        assert 'href="/runs/mine"' in client.get("/?archived=1").text
        too_long = client.post("/runs/mine/notes", data={"note": "x" * 30_000})
        assert (
            too_long.status_code,
            "note: String should have at most 20000 characters" in too_long.text,
        ) == (404, True)
        assert client.post("/runs/mine/notes", data={"note": "x" * 200_000}).status_code == 413


def test_a_failed_run_says_why_until_it_goes_on(own: Recorded) -> None:
    folder = RunFolder(own.root / "mine")
    note_start(folder, steps=9)
    note_failure(folder, RuntimeError("the <gateway> died"))
    store = Store(str(folder.store))
    store.end_run(store.runs()[0]["id"], "failed")
    store.close()
    with TestClient(create_app(own.root)) as client:
        for path in ("/", "/runs/mine"):
            assert "RuntimeError: the &lt;gateway&gt; died" in client.get(path).text
        page = client.get("/runs/mine").text
        for said in ("Step 4 of 9", f"agentrl train --resume {folder.root}",
                     '<th scope="row">torch</th>'):  # fmt: skip
            assert said in page
        folder.summary.touch()
        note_start(folder, steps=9)
        assert not folder.summary.exists()  # it has not ended
        assert "the &lt;gateway&gt; died" not in client.get("/runs/mine").text


def test_ended_runs_are_not_opened_again_for_the_list(own: Recorded) -> None:
    shutil.move(own.root / "mine", own.root / "renamed")
    with TestClient(create_app(own.root)) as client:
        assert 'href="/runs/renamed/rollouts"' in client.get("/runs/renamed").text
        before = client.get("/").text
        app: Any = client.app
        app.state.sources.close()
        shutil.move(own.root / "renamed" / "store.db", own.root.parent / "away.db")
        assert client.get("/").text == before
        (own.root / "renamed" / "lock").touch()  # a resume
        assert "is not there, or does not hold the run" in client.get("/").text


async def test_a_page_beside_a_run_that_was_opened_again_is_told_nothing(
    own: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_PERIOD_S", 0.05)
    watcher, told, indexed = watching.Watcher(), list[float](), asyncio.Event()
    first, again = (open_run(RunFolder(own.root / "mine")) for _ in range(2))

    async def live() -> None:
        async for _ in watcher.changes(first):
            told.append(time.monotonic())
            indexed.set()

    watcher.start()
    page = asyncio.create_task(live())
    await asyncio.wait_for(indexed.wait(), 60)
    await asyncio.sleep(1)
    before = list(told)
    for _ in range(5):
        watcher.look_at(again)
        await asyncio.sleep(0.2)
    watcher.stop()
    await page
    assert told == before != []
    for run in (first, again):
        run.close()


async def test_pages_that_follow_a_run_share_its_overview_until_it_changes(
    own: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_PERIOD_S", 0.05)
    watcher, run = watching.Watcher(), open_run(RunFolder(own.root / "mine"))
    made = list[int]()

    def overview(_: object) -> dict[str, Any]:
        made.append(len(made))
        return {"made": made[-1]}

    assert [watcher.overview(run, overview)["made"] for _ in range(2)] == [0, 1]  # no one follows
    watcher.start()
    changes = watcher.changes(run)
    await anext(changes)  # it is indexed
    assert {watcher.overview(run, overview)["made"] for _ in range(10)} == {2}
    with closing(open_store(RunFolder(own.root / "mine"))[0]) as store:
        store.end_run(run.id, "failed")
    await anext(changes)
    assert watcher.overview(run, overview)["made"] == 3
    now = watcher.look_at(run).version
    await asyncio.wait_for(anext(watcher.changes(run, "before")), 5)  # it changed before it asks
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watcher.changes(run, now)), 0.5)
    watcher.stop()
    run.close()
