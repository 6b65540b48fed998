from types import SimpleNamespace

import pytest

from agentrl.runner.probes import QueueWatch


def test_the_longer_a_queue_is_empty_the_longer_a_worker_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("agentrl.runner.probes.time", clock)
    watch = QueueWatch("")

    assert watch.due()
    assert watch.tick_s() == 0.05
    now += 4.0
    assert watch.tick_s() == pytest.approx(0.2)
    now += 60.0
    assert watch.tick_s() == 0.25

    watch.found()  # a rollout, which takes a minute
    now += 60.0
    assert watch.due()
    assert watch.tick_s() == 0.05
