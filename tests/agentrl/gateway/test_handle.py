"""How a gateway process is started."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import agentrl.samplers.embedded  # noqa: F401  a fork must have it
from agentrl.gateway import handle


@pytest.mark.parametrize(
    ("platform", "gpus", "threads", "forks"),
    [
        ("linux", 0, 1, True),
        ("linux", 1, 1, False),
        ("linux", 0, 2, False),
        ("darwin", 0, 1, False),
    ],
)
def test_a_gateway_is_forked_only_where_that_is_safe(
    platform: str, gpus: int, threads: int, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    assert handle._may_fork() is forks
