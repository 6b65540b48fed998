"""Seconds and busy cores by phase, and how heavy imports set OpenMP."""

from __future__ import annotations

import os
import time

import pytest

from agentrl.timing import PhaseTimer, heavy_imports


def test_a_phase_counts_its_seconds_and_its_busy_cores() -> None:
    one, total = PhaseTimer(), PhaseTimer()
    with one("work"):
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
    total.add(one)
    total.add(one)
    assert total.spent["work"] == pytest.approx(2 * one.spent["work"])
    assert one.spent["work"] >= 0.3
    # This process alone kept a core busy; clocks of the system tick every 10 ms.
    assert one.busy["work"] >= 0.2
    assert 0.2 / 0.5 / (os.cpu_count() or 1) <= one.shares()["work"] <= 1


def test_openmp_settings_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with heavy_imports():
        assert os.environ["GOMP_SPINCOUNT"] == "30000"
        assert os.environ["KMP_BLOCKTIME"] == "7"
    assert "GOMP_SPINCOUNT" not in os.environ
    assert os.environ["KMP_BLOCKTIME"] == "7"
