"""The pages of evaluations and of several runs."""

from __future__ import annotations

import html
import re

from starlette.testclient import TestClient
from ui_pages import Recorded


def shown(client: TestClient, path: str, status: int = 200) -> str:
    """Return a page's text without its markup."""
    response = client.get(path)
    assert response.status_code == status
    text = re.sub(r"<script.*?</script>", "", response.text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_every_evaluation_has_its_interval_and_the_first_and_last_are_compared(
    client: TestClient, recorded: Recorded
) -> None:
    text = shown(client, f"{recorded.run}/evaluations")
    assert "Step 0 and step 4" in text
    assert "+33.3 points on 6 tasks, p = 0.62" in text
    assert "Gained: 3 tasks" in text
    assert "Lost: 1 tasks" in text
    assert "66.7 % (30 % to 90.3 %)" in text
    page = client.get(f"{recorded.run}/evaluations").text
    assert f"{recorded.run}/tasks/eval/1" in page
    for link in set(re.findall(rf"{recorded.run}/rollouts/[0-9a-f]+", page)):
        assert client.get(link).status_code == 200


def test_other_steps_and_fields_can_be_chosen(client: TestClient, recorded: Recorded) -> None:
    text = shown(client, f"{recorded.run}/evaluations?before=2&after=4&by=level")
    assert "Step 2 and step 4" in text
    assert "Success by level" in text
    assert "easy 100 % (" in text
    assert "Step 0 and step 4" in shown(client, f"{recorded.run}/evaluations?before=77&by=nothing")


def test_runs_are_compared_side_by_side(client: TestClient, recorded: Recorded) -> None:
    text = shown(client, "/compare?run=known&run=other&over=time")
    assert "learning.learning_rate – 0.02" in text
    assert "-16.7 points on 6 tasks, p = 1" in text
    assert "Gained: 0 tasks Lost: 1 tasks" in text
    assert "Mean reward" in text
    assert "Choose two or more runs" in shown(client, "/compare?run=known")
    assert "at most 8" in shown(client, "/compare?" + "&".join(f"run={n}" for n in range(9)), 404)
    assert "no run folder" in shown(client, "/compare?run=known&run=missing", 404)
