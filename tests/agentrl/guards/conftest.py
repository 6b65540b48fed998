"""Guarded runs take minutes: ``make guards`` makes them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "guards" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("guards"):
                item.add_marker(pytest.mark.skip(reason="make guards"))
