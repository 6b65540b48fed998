"""How many cores there are, and how many threads and runners use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from agentrl import capacity
from agentrl.capacity import available_cores, choose_runners, sampler_threads, trainer_threads
from agentrl.config.checks import correction_mode
from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.settings.agent import TrainAgentSettings
from agentrl.config.settings.gateway import GatewaySettings
from agentrl.config.settings.models import ModelSettings
from agentrl.config.settings.rollouts import RolloutSettings
from agentrl.config.settings.sampler import SamplerSettings, TrainSamplerSettings
from agentrl.gateway.process import GatewayPlan, make_sampler
from agentrl.samplers.embedded import EmbeddedSampler
from agentrl.training.setup.clients import create_clients
from agentrl_trainer.models.host_memory import ModelSize
from agentrl_trainer.tiny import MODEL_DIR

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
OTHER = str(MODEL_DIR)
ALONE = "the default where each agent is a program of its own"


@pytest.mark.parametrize(
    ("model", "agent", "how", "rollouts", "runners", "why"),
    [
        (OTHER, FORKED, {}, 64, 32, "16 for each of 2 cores"),
        (OTHER, FORKED, {}, 12, 12, "a step or an evaluation has 12 rollouts"),
        (OTHER, FORKED, {}, 4, 8, "the default; a step or an evaluation has 4 rollouts"),
        (OTHER, FORKED, {"runners": 8}, 64, 8, None),
        (OTHER, FORKED | {"sandbox": True}, {}, 64, 8, ALONE),
        (OTHER, FORKED | {"python": "/usr/bin/python3"}, {}, 64, 8, ALONE),
        (OTHER, COMMAND, {}, 64, 8, ALONE),
        (OTHER, FORKED, {"runners": "ray:4"}, 64, 4, None),
        (OTHER, FORKED, {"runners": "ray"}, 64, 8, "the default on Ray"),
        ("agentrl-tiny", FORKED, {}, 64, 8, "the default for agentrl-tiny, which answers sooner"),
    ],
)
def test_runners_are_chosen_for_a_reason(
    model: str,
    agent: dict[str, Any],
    how: dict[str, Any],
    rollouts: int,
    runners: int,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "free_on_host", lambda: 64 * 10**9)
    config = TrainConfig(
        agent=TrainAgentSettings(tasks=Path("none"), **agent),
        model=ModelSettings(name=model, cores=2, device="cpu"), rollouts=RolloutSettings(**how),
    )  # fmt: skip
    said = choose_runners(config, rollouts)
    assert config.rollouts.runners == runners
    assert (said is None) == (why is None)
    assert (said or "").startswith(f"{runners} runners (rollouts.runners): {why}" if why else "")


LARGER = ModelSize(weights=2 * 10**9, widths=10**6, of_token=10**5)


@pytest.mark.parametrize(
    ("trains", "device", "cores", "free", "runners", "why"),
    [
        # Of 20 GB weights twice and 0.5 GB for adapter and optimizer; 0.3 GB for each agent.
        (True, "cpu", 2, 20e9, 23, "328.0 MB each in half of the 15.5 GB that the model leaves"),
        (False, "cpu", 2, 20e9, 27, "328.0 MB each in half of the 18.0 GB that the model leaves"),
        (True, "cuda", 16, 20e9, 50, "200.0 MB each in half of the 20.0 GB that is free"),
        (True, "cpu", 2, 3e9, 8, "328.0 MB each in half of the 0 bytes that the model leaves"),
        (True, "cuda", 16, 64e9, 64, "with more, each answer takes longer"),
    ],
)
def test_runners_are_as_many_as_memory_holds(
    trains: bool,
    device: str,
    cores: int,
    free: float,
    runners: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "free_on_host", lambda: int(free))
    monkeypatch.setattr(capacity, "model_size", lambda _: LARGER)
    model = {"name": OTHER, "device": device, "cores": cores}
    agent, tasks = {"entrypoint": "json:loads"}, {"tasks": "none"}
    config = (
        TrainConfig.model_validate({"model": model, "agent": agent | tasks})
        if trains
        else EvalConfig.model_validate({"model": model, "agent": agent, "evaluation": tasks})
    )
    said = choose_runners(config, 100)
    assert said is not None
    assert said.startswith(f"{runners} runners")
    assert said.endswith(why)


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
