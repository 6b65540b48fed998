"""Pages in a browser while a run goes on, and what their charts do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import until
from playwright.sync_api import Locator
from playwright.sync_api import TimeoutError as PageTimeoutError
from training_run import Run
from ui_browser import Tab, open_tab, serve_pages
from ui_pages import Recorded, record_run

from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store

CHART = "echarts.getInstanceByDom(document.querySelector('#chart-{} .canvas'))"
AGENT = """
import os, time
from pathlib import Path
from openai import OpenAI
from agentrl import emit_reward

def agent(task):
    said = [{"role": "user", "content": "Say something."}]
    OpenAI().chat.completions.create(model=os.environ["AGENTRL_MODEL"], messages=said, max_tokens=4)
    emit_reward(0.0)
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.1)
"""


def test_a_page_beside_a_run_follows_it_takes_feedback_and_ends_with_it(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "train.toml").write_text('[adapters.policy]\nrewards = ["reward", "human:quality"]')
    run = Run(
        tmp_path, f"{tmp_path / 'agent.py'}:agent", steps=500, eval_tasks=None, batch_size=1,
        group_size=2, config=tmp_path / "train.toml",
    )  # fmt: skip
    run.arguments.append("--ui")
    process = run.start()
    assert process.stdout is not None
    try:
        said = next(line for line in process.stdout if "in a browser" in line)
        with open_tab(browser, said.split()[-1]) as tab, run.store() as store:
            until(lambda: store.rewards([one.id for one in store.rollouts(run.run_id)]), 60)
            judged = store.rollouts(run.run_id)[0].id
            page = tab.open(f"/runs/run/rollouts/{judged}")
            page.get_by_label("Score").fill("100")
            page.get_by_label("Your name").fill("me")
            page.get_by_role("button", name="Give feedback").click()
            page.get_by_role("cell", name="quality").wait_for()
            tab.open("/runs/run")
            page.evaluate("window.same = true")
            assert "running" in page.locator("#figures > p").first.inner_text()
            (tmp_path / "go").touch()
            page.locator("#chart-loss canvas").wait_for(timeout=60_000)  # of the first step
            assert page.evaluate("window.same") is True
            assert run.steps()[0]["reward/mean"] == 50
            assert tab.faults == []
    finally:
        process.kill()
        process.communicate()
    until(lambda: not any("agentrl.ui" in one for one in run.processes()), 15, run.processes)


def test_a_new_step_is_drawn_into_the_same_picture_and_what_was_open_stays_open(
    browser: Any, tmp_path: Path
) -> None:
    record_run(tmp_path, "mine")
    with serve_pages(tmp_path) as link, open_tab(browser, link) as tab:
        page = tab.open("/runs/mine")
        rows = page.locator("#figures-reward tbody tr")
        assert rows.count() == 4
        page.locator("#figures-reward summary").press("Enter")  # a click would miss what moves
        page.locator("#chart-reward .canvas").focus()
        page.evaluate("document.querySelector('#chart-reward canvas').marked = true")
        page.evaluate("scrollTo(0, 300)")
        with contextlib.closing(Store(str(RunFolder(tmp_path / "mine").store))) as store:
            row = {"reward/mean": 0.9, "reward/std_over_groups": 0.1}
            store.log_metrics(store.runs()[0]["id"], 5, row)
        rows.nth(4).wait_for()
        assert page.evaluate("document.querySelector('#chart-reward canvas').marked") is True
        assert page.evaluate("document.querySelector('#figures-reward').open") is True
        assert page.evaluate("document.activeElement.closest('figure').id") == "chart-reward"
        assert page.evaluate("scrollY") == 300
        drawn = f"{CHART.format('reward')}.getModel().getSeriesByIndex(0).getData().count()"
        assert page.evaluate(drawn) == 5
        assert tab.faults == []


def click_chart(canvas: Locator, place: str, url: str) -> None:
    """Click where a script says, which leads to ``url``; again if the chart moved meanwhile, as one
    above it was drawn."""

    def click(patience_ms: int) -> None:
        canvas.click(position=canvas.page.evaluate(place))
        canvas.page.wait_for_url(url, timeout=patience_ms)

    try:
        click(10_000)
    except PageTimeoutError:
        click(30_000)


def test_charts_are_saved_stepped_through_and_clicked(
    tab: Tab, recorded: Recorded, tmp_path: Path
) -> None:
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

    canvas = page.locator("#chart-reward .canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    place = f"{CHART.format('reward')}.convertToPixel('grid', [3, 0.5])"
    click_chart(canvas, f"(([x, y]) => ({{x, y}}))({place})", "**/rollouts?where=*")
    assert page.get_by_label("Where").input_value() == "purpose == 'train' and step == 3"
    assert page.locator("tbody tr").count() == 8

    page = tab.open(recorded.run)
    box = page.locator("#chart-books .canvas")
    box.scroll_into_view_if_needed()
    place = f"""() => {{
      const series = {CHART.format("books")}.getModel().getSeriesByIndex(0);
      const data = series.getData(), view = series.layoutInfo;
      const {{ x, y, dx, dy }} = data.getItemLayout(data.indexOfName('evaluation'));
      return {{ x: view.x + x + dx / 2, y: view.y + y + dy / 2 }};
    }}"""
    click_chart(box, place, "**/calls?verdict=evaluation")
