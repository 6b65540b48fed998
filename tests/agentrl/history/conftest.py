"""Fixtures of the tests of what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from ui_pages import Recorded, fill_indexes

from agentrl.history.sources import OpenRun, Sources


@pytest.fixture(scope="module")
def run(recorded: Recorded) -> Iterator[OpenRun]:
    """The other one of the recorded runs, indexed."""
    fill_indexes(recorded.root)
    with closing(Sources(recorded.root)) as sources:
        yield sources.open(recorded.other)
