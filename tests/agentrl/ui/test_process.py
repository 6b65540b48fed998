"""The pages that ``agentrl train --run.ui`` serves beside itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gateway import until

from agentrl.ui.process import pages_beside


def test_the_pages_give_way_to_the_training(tmp_path: Path) -> None:
    with pages_beside(tmp_path, tmp_path / "ui.log") as (process, _):
        session = Path(f"/proc/{process.pid}/autogroup")
        if not session.exists() or not session.read_text():
            pytest.skip("this kernel does not weigh sessions against each other")
        until(lambda: session.read_text().endswith("nice 10\n"))
