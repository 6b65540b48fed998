"""The pages of sweeps: their figures without JavaScript, hostile texts, and the file to share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from starlette.testclient import TestClient
from sweeps import record_sweep
from ui_browser import open_tab, serve_pages

from agentrl.runs.folder import RunFolder
from agentrl.ui.app import create_app
from agentrl.ui.sweep_charts import sweep_charts
from agentrl.ui.sweep_files import write_pictures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    record_sweep(root)
    return root


def test_the_page_has_each_trial_and_a_running_sweep_asks_for_what_is_new(root: Path) -> None:
    with TestClient(create_app(root)) as client:
        text = client.get("/sweeps/known").text
        assert "/sweeps/known" in client.get("/sweeps").text
        assert "hx-get" not in text.partition("</h1>")[0]
        folder = RunFolder(root / "known")
        folder.lock()
        asks = re.search(r'hx-get="(/sweeps/known\?seen=[^"]*)"', client.get("/sweeps/known").text)
        assert asks is not None
        assert client.get(asks[1]).status_code == 204
        assert client.get("/sweeps/known?seen=other").status_code == 200
        assert client.get("/sweeps/nowhere").status_code == 404
    assert text.count("<tr data-trial=") == 12
    assert text.index('data-trial="7"') < text.index('data-trial="0"')  # the best first
    assert '<a href="/runs/known-007">known-007</a>' in text
    assert "0.5833 ± 0.01" in text
    assert re.search(r"Importance is a rough guess: only \d+ trials are complete", text)
    assert "learning.learning_rate = 0.001709" in text
    assert "agentrl train --config" in text
    assert "&lt;b&gt;no memory&lt;/b&gt;" in text
    for kind in ("parallel", "bars", "contour", "lines"):
        assert f'class="chart {kind}"' in text
    assert "<script>window.hacked" not in text


def test_the_file_to_share_has_everything_inside_and_nothing_hostile(tmp_path: Path) -> None:
    with TestClient(create_app(tmp_path)) as client:
        assert "No sweeps here yet" in client.get("/sweeps").text
    picture, page = write_pictures(RunFolder(tmp_path / "known"), record_sweep(tmp_path))
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<script>window.hacked" not in text
    markup = re.sub("<script>.*?</script>", "", text, flags=re.S)
    assert not re.search("(src|href)=", markup)
    assert text.count("<tr data-trial=") == 12


def test_a_study_that_cannot_be_read_is_named_beside_the_others(tmp_path: Path) -> None:
    record_sweep(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/study.db").write_text("no database")
    with TestClient(create_app(tmp_path)) as client:
        text = client.get("/sweeps").text
    assert "/sweeps/known" in text
    assert "bad/study.db cannot be read" in text


def test_settings_with_the_same_last_part_have_a_bar_each(tmp_path: Path) -> None:
    found = record_sweep(tmp_path)
    names = ["algorithm.ppo.clip_high_threshold", "algorithm.cispo.clip_high_threshold"]
    found.importance = {names[0]: 0.5, names[1]: 0.3, "learning.rank": 0.2}
    [chart] = [one for one in sweep_charts(found) if one["id"] == "importance"]
    assert [row[0] for row in chart["rows"]] == [*names, "rank"]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser_the_charts_are_drawn_and_brushing_an_axis_chooses_trials(
    browser, root: Path, width: int, scheme: str
) -> None:
    with serve_pages(root) as link, open_tab(browser, link, width=width, scheme=scheme) as tab:
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
