"""A page follows a real run of agentrl-tiny without being loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_gateway import until
from training_run import Run
from ui_pages import open_tab, serve_pages


def test_a_page_follows_a_run_while_it_trains(browser: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, "mixed", steps=2, eval_tasks=None)
    process = run.start()
    try:
        until(run.folder.exists, 60)
        with serve_pages(tmp_path) as link, open_tab(browser, link) as tab:
            page = tab.open("/runs/run")
            page.evaluate("window.same = true")
            seen: list[str] = []

            def shows(what: str) -> bool:
                page.wait_for_timeout(100)  # Playwright hears of faults only meanwhile
                seen.append(page.locator("#figures > p").first.inner_text())
                return what in seen[-1]

            for what in ("Step 2", "finished"):  # step 1 may pass between two looks
                until(lambda what=what: shows(what), 90, log=lambda: [*dict.fromkeys(seen)])
            assert any("running" in text and "Step 2" not in text for text in seen)
            assert page.evaluate("window.same") is True
            assert page.locator("figure.chart canvas").count() > 3
            assert tab.faults == []
    finally:
        run.finish(process)
