"""The pages of sweeps: their figures without JavaScript, hostile texts, and the file to share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from starlette.testclient import TestClient
from sweeps import record_sweep
from ui_pages import open_tab, serve_pages

from agentrl.runs.folder import RunFolder
from agentrl.sweep.record import read_record
from agentrl.ui.app import create_app
from agentrl.ui.sweep_report import write_pictures


def test_the_page_has_each_trial_with_its_values_and_its_run(tmp_path: Path) -> None:
    record_sweep(tmp_path)
    with TestClient(create_app(tmp_path)) as client:
        text = client.get("/sweeps/known").text
        assert "/sweeps/known" in client.get("/sweeps").text
    assert text.count("<tr data-trial=") == 12
    assert text.index('data-trial="7"') < text.index('data-trial="0"')  # the best first
    assert '<a href="/runs/known-007">known-007</a>' in text
    assert "0.5833 ± 0.01" in text
    assert "learning.learning_rate = 0.001709" in text
    assert "agentrl train --config known" in text
    assert "&lt;b&gt;no memory&lt;/b&gt;" in text
    for kind in ("parallel", "bars", "contour", "lines"):
        assert f'class="chart {kind}"' in text
    assert "<script>window.hacked" not in text


def test_a_page_of_a_running_sweep_asks_again_and_gets_only_what_is_new(tmp_path: Path) -> None:
    record_sweep(tmp_path)
    folder = RunFolder(tmp_path / "known")
    with TestClient(create_app(tmp_path)) as client:
        assert "hx-get" not in client.get("/sweeps/known").text.partition("</h1>")[0]
        folder.lock()
        text = client.get("/sweeps/known").text
        seen = read_record(tmp_path, "known").version
        assert f'hx-get="/sweeps/known?seen={seen}"' in text
        assert client.get(f"/sweeps/known?seen={seen}").status_code == 204
        assert client.get("/sweeps/known?seen=other").status_code == 200


def test_a_sweep_that_is_none_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with TestClient(create_app(tmp_path)) as client:
        for name in ("empty", "nowhere"):
            assert client.get(f"/sweeps/{name}").status_code == 404
        assert "No sweeps here yet" in client.get("/sweeps").text


def test_the_file_to_share_has_everything_inside_and_nothing_hostile(tmp_path: Path) -> None:
    record = record_sweep(tmp_path)
    picture, page = write_pictures(RunFolder(tmp_path / "known"), record)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<script>window.hacked" not in text
    markup = re.sub("<script>.*?</script>", "", text, flags=re.S)
    assert not re.search("(src|href)=", markup)
    assert text.count("<tr data-trial=") == 12


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser_the_charts_are_drawn_and_brushing_an_axis_chooses_trials(
    browser, tmp_path: Path, width: int, scheme: str
) -> None:
    record_sweep(tmp_path)
    with serve_pages(tmp_path) as link, open_tab(browser, link, width=width, scheme=scheme) as tab:
        page = tab.open("/sweeps/known")
        assert page.locator(".chart canvas").count() == 4
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        if width == 1280:
            box = page.locator(".chart.parallel .canvas").bounding_box()
            x, top = box["x"] + box["width"] - 110, box["y"] + 64  # the metric's axis
            page.mouse.move(x, top + 2)
            page.mouse.down()
            page.mouse.move(x, top + 100, steps=5)
            page.mouse.up()
            page.get_by_text("3 of 12 trials chosen").wait_for()
            assert page.locator("#trials tbody tr:visible").count() == 3
        assert page.evaluate("window.hacked") is None
        assert tab.faults == []
