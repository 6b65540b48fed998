"""Tinker's official SDK against our server, and the client's tinker backend over both.

The checks are in ``tinker_checks``, which runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peer import Ask

pytestmark = [pytest.mark.tinker, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "check",
    [
        "the_sdk_learns_what_the_local_client_does",
        "both_backends_give_the_same",
        "rows_there_are_rows_here",
        "operations_after_prepare_come_after_it",
        "the_sampler_gives_what_the_client_does",
        "a_loss_that_is_not_finite_is_not_applied",
    ],
)
def test_over_the_server(sdk: Ask, shared_server: Any, tmp_path: Path, check: str) -> None:
    before = shared_server.requests.count("optim_step")
    failure = sdk("check", name=check, url=shared_server.url, folder=str(tmp_path))
    assert not failure, failure
    if check == "a_loss_that_is_not_finite_is_not_applied":
        # Our server would refuse it itself; another one need not, so it must not be asked.
        assert shared_server.requests.count("optim_step") == before + 1
