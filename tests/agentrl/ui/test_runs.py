"""The list of runs, one run's page, its books and calls."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from ui_pages import Recorded, record_run

from agentrl.runs.circumstances import note_failure, note_start
from agentrl.runs.folder import RunFolder
from agentrl.ui.app import create_app
from agentrl_tracer.store import Store


def _charts(text: str) -> dict[str, Any]:
    found = re.findall(
        r'id="chart-([^"]+)".*?<script type="application/json">(.*?)</script>', text, re.S
    )
    return {key: json.loads(data) for key, data in found}


@pytest.fixture
def own(tmp_path: Path) -> Recorded:
    """A run that the test may change."""
    record_run(tmp_path, "mine")
    return Recorded(tmp_path, "mine")


def test_overview_has_the_figures_of_the_run(client: TestClient, recorded: Recorded) -> None:
    text = client.get(recorded.run).text
    charts = _charts(text)
    assert [step for step, _ in charts["reward"]["series"][0]["points"]] == [1, 2, 3, 4]
    assert [len(pair) for pair in charts["reward"]["series"][0]["spread"]] == [2] * 4
    held_out = charts["held-out"]["series"][0]
    for (_, rate), (low, high) in zip(held_out["points"], held_out["spread"], strict=True):
        assert 0 <= low <= rate <= high <= 1
    assert {"length", "entropy", "clip", "learning-rate", "speed", "books"} <= charts.keys()
    lanes = {lane for lane, _, _, _ in charts["timeline"]["spans"]}
    assert lanes == {"rollouts", "update", "checkpoint", "publish", "evaluation"}
    assert min(start for _, start, _, _ in charts["timeline"]["spans"]) == 0
    assert "it adds up" in text
    assert "<img" not in text  # the failed rollout's error is hostile


def test_every_bar_of_the_books_leads_to_its_calls(client: TestClient, recorded: Recorded) -> None:
    books = _charts(client.get(recorded.run).text)["books"]
    amounts = {link["target"]: link["value"] for link in books["links"]}
    led = {node["name"]: node["href"] for node in books["nodes"] if node["href"]}
    assert {"trained", "evaluation", "failed_rollout", "other_agent"} <= led.keys()
    for verdict, href in led.items():
        seen, at = list[str](), href
        while at:
            text = client.get(at).text
            seen += re.findall(r'href="([^"]+#call-[^"]+)"', text)
            more = re.search(r'rel="next" href="([^"]+)"', text)
            at = html.unescape(href.split("?")[0] + more[1]) if more else ""
        assert len(seen) == len(set(seen)) == amounts[verdict]


def test_table_of_the_books_has_the_same_links(client: TestClient, recorded: Recorded) -> None:
    text = client.get(recorded.run).text
    table = text[text.index('id="figures-books"') :]
    assert f'<a href="{recorded.run}/calls?verdict=trained">trained</a>' in table


def test_calls_of_an_unknown_verdict_or_place_are_refused(
    client: TestClient, recorded: Recorded
) -> None:
    for query, field in (("verdict=nonsense", "verdict"), ("before=x.y", "before")):
        answer = client.get(f"{recorded.run}/calls?{query}")
        assert answer.status_code == 404
        assert f"{field}: " in answer.text


def test_runs_are_filtered_by_text_state_and_tag(own: Recorded) -> None:
    record_run(own.root, "second")
    with TestClient(create_app(own.root)) as client:
        client.post("/runs/mine/notes", data={"tags": "best, <b>", "note": "rank 8\r\nwas enough"})
        assert 'href="/runs/mine"' in client.get("/").text
        assert "&lt;b&gt;" in client.get("/").text
        for query, names in (
            ("text=RANK", ["mine"]),
            ("text=sec", ["second"]),
            ("tag=best", ["mine"]),
            ("state=failed", []),
            ("state=finished", ["second", "mine"]),
        ):
            text = client.get(f"/?{query}").text
            assert re.findall(r'<td><a href="/runs/([^"/]+)"', text) == names


def test_notes_are_kept_and_archived_runs_are_listed_apart(own: Recorded) -> None:
    with TestClient(create_app(own.root)) as client:
        saved = client.post("/runs/mine/notes", data={"tags": "a, b,a", "note": "<script>x"})
        assert saved.history[0].headers["location"] == "/runs/mine"
        assert 'value="a, b"' in saved.text
        assert "&lt;script&gt;x</textarea>" in saved.text
        listed = client.post("/runs/mine/notes", data={"archived": "1", "run": "mine"}).text
        assert 'href="/runs/mine"' not in listed
        assert 'href="/runs/mine"' in client.get("/?archived=1").text
        assert 'value="a, b"' in client.get("/runs/mine").text
        too_long = client.post("/runs/mine/notes", data={"note": "x" * 30_000})
        assert (too_long.status_code, "note: 30,000 characters" in too_long.text) == (404, True)
        assert client.post("/runs/mine/notes", data={"note": "x" * 200_000}).status_code == 413


def test_a_failed_run_says_why_until_it_goes_on(own: Recorded) -> None:
    folder = RunFolder(own.root / "mine")
    note_start(folder, steps=9)
    note_failure(folder, RuntimeError("the <gateway> died"))
    store = Store(str(folder.store))
    [run] = store.runs()
    store.end_run(run["id"], "failed")
    store.close()
    with TestClient(create_app(own.root)) as client:
        for path in ("/", "/runs/mine"):
            assert "RuntimeError: the &lt;gateway&gt; died" in client.get(path).text
        page = client.get("/runs/mine").text
        assert "Step 4 of 9" in page
        assert f"agentrl train --resume {folder.root}" in page
        assert '<th scope="row">torch</th>' in page
    note_start(folder, steps=9)
    with TestClient(create_app(own.root)) as client:
        assert "the &lt;gateway&gt; died" not in client.get("/runs/mine").text


def test_ended_runs_are_not_opened_again_for_the_list(own: Recorded) -> None:
    with TestClient(create_app(own.root)) as client:
        before = client.get("/").text
        app: Any = client.app
        app.state.sources.close()
        shutil.move(own.root / "mine" / "store.db", own.root.parent / "away.db")
        assert client.get("/").text == before
        (own.root / "mine" / "lock").touch()  # a resume
        assert "is not there, or does not hold the run" in client.get("/").text


def test_run_is_found_by_its_folder_after_a_rename(own: Recorded) -> None:
    shutil.move(own.root / "mine", own.root / "renamed")
    with TestClient(create_app(own.root)) as client:
        text = client.get("/runs/renamed").text
        assert 'href="/runs/renamed/rollouts"' in text
