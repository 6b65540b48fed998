"""Fixtures that several floors share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_tracer.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "store.db"))
    yield opened
    opened.close()
