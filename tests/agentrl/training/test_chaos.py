"""A short form of ``scripts/chaos.py``, which CI can afford; docs/checks.md has the long form."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_killed_processes_lose_no_answer_and_train_no_half_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    from chaos import chaos

    quota = {"gateway": 1, "pool": 1, "worker": 1, "agent": 2, "trainer": 1}
    which = {"stores": ["sqlite"], "shapes": ["two_adapters"], "steps": 3, "pause_s": 0.3}
    found = chaos(tmp_path, quota, **which)
    assert found == []
