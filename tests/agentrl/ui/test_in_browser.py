"""Load every view in Debian's Chromium: without faults, readable, safe against hostile output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_gateway import until
from ui_browser import Tab, open_tab
from ui_pages import Recorded

_EVERYTHING = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
_OF_COLOR_AND_WIDTH = {"type": "rule", "values": ["color-contrast", "scrollable-region-focusable"]}
_FITS = "document.documentElement.scrollWidth <= innerWidth"
_WIDE = """() => [...document.querySelectorAll('body *')].filter(
  e => !e.parentElement.closest('.wide') && !e.matches('.skip')
    && e.getBoundingClientRect().right > innerWidth + 1
).slice(0, 5).map(e => e.outerHTML.slice(0, 99))"""


@pytest.mark.parametrize(
    ("scheme", "width", "rules"),
    [("light", 1280, _EVERYTHING), ("dark", 390, _OF_COLOR_AND_WIDTH)],
)
def test_every_view_loads_without_faults_and_axe_finds_nothing_serious(
    browser, link: str, recorded: Recorded, scheme: str, width: int, rules: Any
) -> None:
    options = {"runOnly": rules, "resultTypes": ["violations"]}
    found: list[str] = []
    with open_tab(browser, link, width=width, scheme=scheme) as tab:
        for name, path in recorded.views.items():
            answer = tab.page.goto(tab.origin + path, wait_until="load")
            assert answer.status == 200, name
            fits, too_wide = partial(tab.page.evaluate, _FITS), partial(tab.page.evaluate, _WIDE)
            until(fits, 3, log=lambda: f"{name} scrolls sideways: {too_wide()}")  # noqa: B023
            assert tab.page.evaluate("window.hacked") is None, name
            for one in Axe().run(tab.page, options=options).response["violations"]:
                if one["impact"] in ("serious", "critical"):
                    found += [f"{name}: {one['id']}: {one['nodes'][0]['html'][:200]}"]
        assert tab.faults == []
    assert found == []


def test_tables_and_texts_are_there_without_javascript(browser, link: str, recorded) -> None:
    context = browser.new_context(java_script_enabled=False)
    page, origin = context.new_page(), link.split("/?")[0]
    assert page.goto(origin + recorded.run).status == 403
    assert recorded.name not in page.content()
    page.goto(link)
    for name, path in recorded.views.items():
        page.goto(origin + path)
        assert page.locator("h1").inner_text().strip(), name
    page.goto(f"{origin}{recorded.run}/rollouts")
    assert page.locator("tbody tr").count() == 50
    context.close()


def test_the_keyboard_reaches_content_first_and_then_the_filter(tab: Tab, recorded) -> None:
    page = tab.open(f"{recorded.run}/rollouts")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('name')"))
    assert {"where", "search"} <= set(reached)
    page.get_by_label("Where").fill('status == "failed"')
    page.keyboard.press("Enter")
    page.wait_for_url("**where=s**")
    assert page.locator("tbody tr").count() == 1


def test_what_an_agent_wrote_is_text_and_leads_nowhere(tab: Tab, recorded: Recorded) -> None:
    page = tab.open(f"{recorded.run}/rollouts/{recorded.ids['hostile']}")
    text = page.inner_text("main")
    assert "<script>window.hacked = 1</script>" in text
    assert "{{ 7 * 7 }}" in text
    assert "\x1b" not in text
    active = "main a[href^='javascript:'], main img, main script:not([type])"
    assert page.locator(active).count() == 0
    assert page.evaluate("window.hacked") is None
    long = tab.page.goto(f"{tab.origin}{recorded.run}/rollouts/{recorded.ids['long']}")
    assert len(long.body()) < 300_000, "a line of 10 MB is cut"
