"""Pages that are served, and Debian's Chromium to open them in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = "/usr/bin/chromium"
INSTALL_CHROMIUM = "no browser here; install it with: apt-get install chromium"
_CACHE = tempfile.TemporaryDirectory(prefix="agentrl-cache-")  # of this process's pages


@contextlib.contextmanager
def serve_pages(root: Path, *arguments: str) -> Iterator[str]:
    """Run ``agentrl ui`` on a free port; yield the link that it prints."""
    command = [sys.executable, "-m", "agentrl", "ui", str(root), "--port", "0", *arguments]
    env = {**os.environ, "XDG_CACHE_HOME": _CACHE.name}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Start Chromium, for Playwright's sync API; its pages reach this machine only."""
    from playwright.sync_api import sync_playwright

    flags = "no-sandbox disable-gpu disable-quic disable-sync no-first-run"
    flags += " disable-background-networking disable-component-update"
    arguments = [f"--{flag}" for flag in flags.split()]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the browser, signed in, that notes what should not happen."""

    page: Any
    origin: str
    faults: list[str] = field(default_factory=list)
    """Console errors, exceptions, and requests to other hosts."""

    def open(self, path: str) -> Any:
        """Go to a path and wait until its scripts and requests are done; return the page."""
        self.page.goto(self.origin + path, wait_until="load")
        return self.page


@contextlib.contextmanager
def open_tab(
    browser: Any, link: str, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Tab]:
    """Open a tab of its own cookies at the page that ``link`` leads to."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, origin = context.new_page(), link.split("/?")[0]
    tab = Tab(page, origin)
    page.on("console", lambda said: tab.faults.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: tab.faults.append(str(error)))

    def note(request: Any) -> None:
        if not request.url.startswith((origin, "data:")):
            tab.faults.append(f"a request to {request.url}")

    page.on("request", note)
    page.goto(link)
    yield tab
    context.close()


def has_browser() -> bool:
    return os.access(CHROMIUM, os.X_OK)
