"""The process that serves the pages: beside a training, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_gateway import until
from ui_pages import Recorded

from agentrl.ui.process import pages_beside


def test_the_pages_give_way_to_the_training(tmp_path: Path) -> None:
    with pages_beside(tmp_path, tmp_path / "ui.log") as (process, _):
        session = Path(f"/proc/{process.pid}/autogroup")
        if not session.exists() or not session.read_text():
            pytest.skip("this kernel does not weigh sessions against each other")
        until(lambda: session.read_text().endswith("nice 10\n"))


def test_it_ends_in_order_though_a_page_follows_a_run(recorded: Recorded, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "ui", str(recorded.root), "--port", "0"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env=env, **pipes) as process:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        with httpx.Client(trust_env=False, follow_redirects=True) as client:
            client.get(link)
            with client.stream("GET", f"{link.partition('/?')[0]}{recorded.run}/live") as page:
                events = page.iter_lines()  # it closes the page when it is gone
                assert "event: changed" in events
                process.terminate()
                said = process.stdout.read()
    assert "ERROR" not in said
