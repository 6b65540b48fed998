"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: sums come out the same, and models this small are quicker so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of examples/recipes."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return import_module
