"""Fixtures of the runners' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from runner_harness import RunnerHarness


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerHarness]:
    """One pool for every test that needs nothing special: starting it takes a second."""
    with closing(RunnerHarness(tmp_path_factory.mktemp("shared"))) as built:
        built.start_any(timeout_s=1.0, runners=3)
        yield built


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RunnerHarness]:
    with closing(RunnerHarness(tmp_path)) as built:
        yield built
