"""Pages over runs with known content, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from ui_browser import INSTALL_CHROMIUM, Tab, has_browser, open_browser, open_tab, serve_pages
from ui_pages import Recorded, fill_indexes


@pytest.fixture(scope="module")  # a test that copies a run takes the locks of what is open here
def client(recorded: Recorded) -> Iterator[TestClient]:
    """The pages without a server: ``client.get("/runs/known").text``; rollouts are indexed."""
    from agentrl.ui.app import create_app

    fill_indexes(recorded.root)
    with TestClient(create_app(recorded.root)) as client:
        yield client


@pytest.fixture(scope="session")
def link(recorded: Recorded) -> Iterator[str]:
    """The link that ``agentrl ui`` prints for the recorded runs, whose rollouts are indexed."""
    fill_indexes(recorded.root)
    with serve_pages(recorded.root) as link:
        yield link


@pytest.fixture(scope="module")  # no longer: Playwright's event loop would break async tests
def browser() -> Iterator[Any]:
    if not has_browser():
        pytest.skip(INSTALL_CHROMIUM)
    with open_browser() as browser:
        yield browser


@pytest.fixture
def tab(browser: Any, link: str) -> Iterator[Tab]:
    """A tab at 1280 pixels; the test fails if it saw a fault."""
    with open_tab(browser, link) as tab:
        yield tab
        assert tab.faults == []
