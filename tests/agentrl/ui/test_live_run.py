"""A run's page in a browser while the run goes on, and its charts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ui_pages import Recorded, Tab, fill_indexes, open_tab, record_run, serve_pages

from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store

_SHOWN = """() => JSON.parse(
  document.querySelector('#chart-reward script').textContent).series[0].points.length"""


@pytest.fixture
def served(tmp_path: Path, browser: Any) -> Iterator[tuple[Path, Tab]]:
    record_run(tmp_path, "mine")
    fill_indexes(tmp_path)
    with serve_pages(tmp_path) as link, open_tab(browser, link) as tab:
        yield tmp_path, tab
        assert tab.faults == []


def test_a_new_step_is_drawn_into_the_same_picture_and_what_was_open_stays_open(
    served: tuple[Path, Tab],
) -> None:
    root, tab = served
    page = tab.open("/runs/mine")
    _wait(page, 4)
    page.locator("#figures-reward summary").click()
    page.locator("#chart-reward .canvas").focus()
    page.evaluate("document.querySelector('#chart-reward canvas').marked = true")
    page.evaluate("scrollTo(0, 300)")
    with contextlib.closing(Store(str(RunFolder(root / "mine").store))) as store:
        [run] = store.runs()
        store.log_metrics(run["id"], 5, {"reward/mean": 0.9, "reward/std": 0.1})
    _wait(page, 5)
    assert page.evaluate("document.querySelector('#chart-reward canvas').marked") is True
    assert page.evaluate("document.querySelector('#figures-reward').open") is True
    assert page.evaluate("document.activeElement.closest('figure').id") == "chart-reward"
    assert page.evaluate("scrollY") == 300
    assert page.locator("#figures-reward tbody tr").count() == 5
    drawn = "echarts.getInstanceByDom(document.querySelector('#chart-reward .canvas'))"
    assert page.evaluate(f"{drawn}.getOption().series[0].data.length") == 5


def _wait(page: Any, steps: int) -> None:  # the policy of the pages forbids wait_for_function
    until = time.monotonic() + 20
    while page.evaluate(_SHOWN) != steps:
        assert time.monotonic() < until, "the page does not show the new step"
        page.wait_for_timeout(100)


def test_charts_are_saved_as_pictures(tab: Tab, recorded: Recorded, tmp_path: Path) -> None:
    page = tab.open(recorded.run)
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        for title in ("Held-out success, 95 % intervals", "Calls from proxied to trained"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Save {title} as {kind}").click()
            assert download.value.suggested_filename.endswith(f".{kind.lower()}")
            download.value.save_as(tmp_path / "picture")
            picture = (tmp_path / "picture").read_bytes()
            assert picture.startswith(begins)
            assert kind == "PNG" or title.encode() in picture


def test_keys_step_through_a_chart_and_a_click_leads_to_the_step(
    tab: Tab, recorded: Recorded
) -> None:
    page = tab.open(recorded.run)
    page.locator("#chart-reward .canvas").focus()
    page.keyboard.press("ArrowRight")
    chart = "echarts.getInstanceByDom(document.querySelector('#chart-reward .canvas'))"
    left, top = page.evaluate(f"{chart}.convertToPixel('grid', [3, 0.5])")
    page.locator("#chart-reward .canvas").click(position={"x": left, "y": top})
    page.wait_for_url("**/rollouts?where=*")
    assert page.get_by_label("Where").input_value() == "purpose == 'train' and step == 3"
    assert page.locator("tbody tr").count() == 8


def test_a_bar_of_the_books_is_clicked(tab: Tab, recorded: Recorded) -> None:
    page = tab.open(recorded.run)
    box = page.locator("#chart-books .canvas")
    box.scroll_into_view_if_needed()
    place = page.evaluate("""() => {
      const chart = echarts.getInstanceByDom(document.querySelector('#chart-books .canvas'));
      const data = chart.getModel().getSeriesByIndex(0).getData();
      const at = data.indexOfName('evaluation');
      const { x, y, dx, dy } = data.getItemLayout(at);
      const view = chart.getModel().getSeriesByIndex(0).layoutInfo;
      return { x: view.x + x + dx / 2, y: view.y + y + dy / 2 };
    }""")
    box.click(position=place)
    page.wait_for_url("**/calls?verdict=evaluation")
