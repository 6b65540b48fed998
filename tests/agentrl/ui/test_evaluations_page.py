"""The pages of evaluations and of several runs."""

from __future__ import annotations

import html
import re
from pathlib import Path

from starlette.testclient import TestClient
from ui_pages import Recorded, begun, record_run

from agentrl.ui.app import create_app


def shown(client: TestClient, path: str, status: int = 200) -> str:
    """Return a page's text without its markup."""
    response = client.get(path)
    assert response.status_code == status
    text = re.sub(r"<script.*?</script>", "", response.text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_every_evaluation_has_its_interval_and_two_are_compared(
    client: TestClient, recorded: Recorded
) -> None:
    path = f"{recorded.run}/evaluations"
    text = shown(client, path)
    for said in ("Step 0 and step 4", "+33.3 points on 6 tasks, p = 0.62", "Gained: 3 tasks",
                 "Lost: 1 task ", "Stayed wrong: 1 task ", "66.7 % (30 % to 90.3 %)"):  # fmt: skip
        assert said in text
    page = client.get(path).text
    assert f"{recorded.run}/tasks/eval/1" in page
    for link in set(re.findall(rf"{recorded.run}/rollouts/[0-9a-f]+", page)):
        assert client.get(link).status_code == 200
    text = shown(client, f"{path}?before=2&after=4&by=level")
    for said in ("Step 2 and step 4", "Success by level", "easy 100 % "):
        assert said in text
    assert "Step 0 and step 4" in shown(client, f"{path}?before=77&by=nothing")


def test_runs_are_compared_side_by_side(
    client: TestClient, recorded: Recorded, tmp_path: Path
) -> None:
    text = shown(client, "/compare?run=known&run=other")
    for said in ("learning.learning_rate – 0.02", "-16.7 points on 6 tasks, p = 1",
                 "Gained: 0 tasks Lost: 1 task ", "Mean reward"):  # fmt: skip
        assert said in text
    with begun(tmp_path, "new", "train"):
        pass
    record_run(tmp_path, "mine")
    with TestClient(create_app(tmp_path)) as own:
        for query in ("run=new&run=mine", "run=mine&run=new"):
            text = shown(own, f"/compare?{query}")
            assert "new has no evaluation yet" in text
            assert "no task in common" not in text
    assert "Choose two or more runs" in shown(client, "/compare?run=known")
    assert "at most 8" in shown(client, "/compare?" + "&".join(f"run={n}" for n in range(9)), 404)
    assert "no run folder" in shown(client, "/compare?run=known&run=missing", 404)
