"""How many cores there are, and how many threads and runners use them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from agentrl.capacity import available_cores, choose_runners, sampler_threads, trainer_threads
from agentrl.config.settings import AgentSettings, RunnerSettings

SMALL, LARGE = 850_000, 135_000_000


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.parametrize(("asked", "cores"), [("1", 1), ("1,2", 1), ("", None), ("many", None)])
def test_omp_num_threads_limits_them(
    asked: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    unlimited = available_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert available_cores() == (cores or unlimited)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 16])
def test_two_busy_computations_share_the_cores(cores: int) -> None:
    trainer = trainer_threads(cores, LARGE, alone=False)
    sampler = sampler_threads(cores, LARGE, alone=False)
    assert trainer + sampler <= max(cores, 2)
    assert min(trainer, sampler) >= 1


def test_alone_they_take_what_there_is() -> None:
    assert trainer_threads(16, LARGE, alone=True) == 16
    assert sampler_threads(2, LARGE, alone=True) == 2
    assert sampler_threads(16, LARGE, alone=True) == 12


def test_a_small_model_has_one_thread() -> None:
    assert trainer_threads(16, SMALL, alone=True) == 1
    assert sampler_threads(16, SMALL, alone=True) == 1


FORKED, COMMAND = {"entrypoint": "examples/hello/agent.py:agent"}, {"entrypoint": "sh -c true"}


@pytest.mark.parametrize(
    ("model", "agent", "how", "rollouts", "runners"),
    [
        ("smollm2-135m", FORKED, {}, 64, 32),
        ("smollm2-135m", FORKED, {}, 12, 12),
        ("smollm2-135m", FORKED, {}, 4, 8),
        ("smollm2-135m", FORKED, {"runners": 8}, 64, 8),
        ("smollm2-135m", FORKED | {"sandbox": True}, {}, 64, 8),
        ("smollm2-135m", FORKED | {"python": "/usr/bin/python3"}, {}, 64, 8),
        ("smollm2-135m", COMMAND, {}, 64, 8),
        ("smollm2-135m", FORKED, {"runners": "ray:4"}, 64, 4),
        ("agentrl-tiny", FORKED, {}, 64, 8),
    ],
)
def test_more_runners_by_default_where_they_cost_little(
    model: str, agent: dict[str, Any], how: dict[str, Any], rollouts: int, runners: int
) -> None:
    settings = RunnerSettings(**how)
    why = choose_runners(model, AgentSettings(**agent), settings, rollouts)
    assert settings.runners == runners
    assert (why is not None) == (runners > 8)
