"""Runs with known content, made once a session."""

from __future__ import annotations

import pytest
from ui_pages import Recorded, record_runs


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The runs ``known`` and ``other``."""
    return record_runs(tmp_path_factory.mktemp("recorded"))
