"""How many cores there are, and how many threads and runners use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
import torch

from agentrl.capacity import available_cores, choose_runners, sampler_threads, trainer_threads
from agentrl.config.checks import correction_mode
from agentrl.config.commands import TrainConfig
from agentrl.config.settings.agent import AgentSettings, TrainAgentSettings
from agentrl.config.settings.gateway import GatewaySettings
from agentrl.config.settings.models import ModelSettings
from agentrl.config.settings.rollouts import RolloutSettings, RunnerSettings
from agentrl.config.settings.sampler import SamplerSettings, TrainSamplerSettings
from agentrl.gateway.process import GatewayPlan, make_sampler
from agentrl.samplers.embedded import EmbeddedSampler
from agentrl.training.setup.clients import create_clients

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
    model: str,
    agent: dict[str, Any],
    how: dict[str, Any],
    rollouts: int,
    runners: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 10**9))
    settings = RunnerSettings(**how)
    why = choose_runners(model, AgentSettings(**agent), settings, rollouts)
    assert settings.runners == runners
    assert (why is not None) == (runners > 8)


def test_agents_get_half_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 10**9))
    settings = RunnerSettings()
    choose_runners("smollm2-135m", AgentSettings(**FORKED), settings, 64)
    assert settings.runners == 20


# ---- who uses them


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every model is worth threads; the test's own number comes back."""
    monkeypatch.setattr("agentrl.capacity._WORTH_THREADS", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("beside", "count"), [(False, 2), (True, 1)])
def test_the_gateways_sampler_computes_with_them(beside: bool, count: int) -> None:
    sampler, renderer = make_sampler(
        GatewayPlan(
            model=ModelSettings(cores=2, device="cpu"), sampler=SamplerSettings(weights="int8"),
            gateway=GatewaySettings(), store="unused", trains_beside=beside,
        )
    )  # fmt: skip
    assert torch.get_num_threads() == count
    assert isinstance(sampler, EmbeddedSampler)
    assert sampler.engine._rounded
    # Whatever may end an answer is none of its text: the end of the turn, and that of all text.
    assert renderer.is_stop(0)
    assert renderer.is_stop(2)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("staleness", "count"), [(0, 2), (1, 1)])
def test_the_trainer_computes_with_them(staleness: int, count: int, tmp_path: Path) -> None:
    config = TrainConfig(
        agent=TrainAgentSettings(entrypoint="json:loads", tasks=tmp_path / "none"),
        model=ModelSettings(cores=2, device="cpu"),
        rollouts=RolloutSettings(max_staleness=staleness),
    )
    backend = create_clients(config, tmp_path, lambda _: None)
    client = backend.clients["policy"]
    assert client.local(lambda _: torch.get_num_threads()).result() == count
    backend.close()


@pytest.mark.parametrize(("weights", "mode"), [("model", "none"), ("int8", "truncate")])
def test_another_policy_of_the_sampler_is_corrected(
    weights: Literal["model", "int8"], mode: str
) -> None:
    config = TrainConfig(
        agent=TrainAgentSettings(entrypoint="json:loads", tasks=Path("none")),
        sampler=TrainSamplerSettings(weights=weights),
    )
    assert correction_mode(config) == mode
