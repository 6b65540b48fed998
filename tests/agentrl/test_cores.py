"""How many cores there are, and who computes with how many threads."""

from __future__ import annotations

import os

import pytest

from agentrl.cores import available_cores, sampler_threads, trainer_threads

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
