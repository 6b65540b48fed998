"""Devices: which one is chosen, and what CUDA and MPS change, as far as a CPU can show it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_mps import pretended_mps
from small_learner import base_model, data, learner, on_policy
from small_models import Asked, as_base, lora_b_from, make_adapter, qwen3, running_engine

from agentrl_trainer.checkpoint import capture_rng, restore_rng
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.inference.kv_cache import default_budget
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.devices import choose_device, free_memory, moved
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.models.sources import ModelError

GIB = 2**30
KINDS = ("cpu", "cuda", "mps")


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_is_cuda_then_mps_then_the_cpu(
    cuda: bool, mps: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto") == torch.device(chosen)


@pytest.mark.parametrize("name", ["cuda:99", "mps:99", "gpu"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"device: '{name}' cannot be used"):
        choose_device(name)


def with_memory(monkeypatch: pytest.MonkeyPatch, kind: str, free: int) -> torch.device:
    """A device of this kind, whose driver says that so much is free."""
    memory = type("Memory", (), {"available": free})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: free + GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: GIB)
    return torch.device(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory(with_memory(monkeypatch, kind, 8 * GIB)) == 8 * GIB


@pytest.mark.parametrize(
    ("kind", "free", "budget"),
    [
        ("cpu", 8 * GIB, 2 * GIB),
        ("cpu", 80 * GIB, 4 * GIB),
        ("mps", 8 * GIB, 2 * GIB),
        ("cuda", 80 * GIB, 48 * GIB),
        ("cuda", 0, 2**20 * 64),  # one context
    ],
)
def test_the_sampler_takes_a_share_of_it(
    kind: str, free: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = learner().base
    there = replace(base, device=with_memory(monkeypatch, kind, free))
    assert default_budget(there, 2**20) == budget // 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_only_copies_to_cuda_are_not_waited_for(kind: str) -> None:
    asked: dict[str, Any] = {}

    class Copied(torch.Tensor):
        def to(self, *_: Any, **options: Any) -> Any:
            asked.update(options)
            return self

    moved(torch.zeros(1).as_subclass(Copied), torch.device(kind))
    assert asked == {"non_blocking": kind == "cuda"}


def test_the_random_states_of_other_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"mps": torch.tensor([1]), "cuda:0": torch.tensor([2])}
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states["mps"])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda x: states.update({"mps": x}))
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [states["cuda:0"]])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda x, at: states.update({at: x}))
    kept = capture_rng()
    before = dict(states)
    states.update(dict.fromkeys(states, torch.tensor([0])))
    restore_rng(kept)
    assert states == before
    # Where the devices are missing, their states are left out.
    monkeypatch.undo()
    restore_rng(kept)


# ---- a pretended Mac: the CPU's numbers, MPS's refusals


def test_the_pretended_device_refuses_what_mps_refuses() -> None:
    with pretended_mps() as mps:
        there = torch.ones(3, device=mps)
        assert there.device.type == "mps"
        with pytest.raises(TypeError, match="float64"):
            there.double()
        with pytest.raises(RuntimeError, match="on mps and on cpu"):
            there + torch.ones(3)


def test_a_mac_loads_a_model_in_its_own_type() -> None:
    with pretended_mps():
        base = load_base("agentrl-tiny", device="mps")
    assert base.device.type == "mps"
    assert {p.device.type for p in base.model.parameters()} == {"mps"}


PARAMS = [
    SampleParams(max_tokens=6, seed=1),
    SampleParams(max_tokens=6, seed=2, top_p=0.8, top_logprobs=3),
    SampleParams(max_tokens=6, seed=3, logit_bias=((7, 5.0), (8, -100.0))),
    SampleParams(max_tokens=6, temperature=0.0),
]


@pytest.mark.parametrize("merge_below", [0, 10**9], ids=["unmerged", "merged"])
def test_a_mac_samples_what_a_cpu_samples(tmp_path: Path, merge_below: int) -> None:
    base = as_base(qwen3())
    make_adapter(base, tmp_path / "v1", seed=1)
    prompts = [[5, 6, 7, 8 + i] for i in range(len(PARAMS))]

    def sampled(own: BaseModel) -> tuple[Any, ...]:
        with running_engine(own, merge_below=merge_below, kv_tokens=4096) as engine:
            engine.load_adapter("policy", 1, tmp_path / "v1").result()
            asked = [Asked(engine, p, x, "policy") for p, x in zip(prompts, PARAMS, strict=True)]
            found = [one.one().tokens for one in asked]
            scored = engine.score(prompts, "policy").result()
            return found, [x.logprobs for x in scored], engine.strategy

    expected = sampled(replace(base, model=copy.deepcopy(base.model)))
    with pretended_mps() as mps:
        found = sampled(replace(base, model=base.model.to(mps), device=mps))
    assert found == expected


def test_a_mac_learns_what_a_cpu_learns() -> None:
    rows = on_policy(learner(off_start=True), data())

    def learned(base: BaseModel) -> tuple[int, list[list[float]]]:
        trainer = Learner(base, rank=4, alpha=8)
        lora_b_from(5, trainer.model)
        trainer.forward_backward(rows)
        trainer.optim_step()
        return trainer.token_budget, trainer.forward(rows)

    expected = learned(base_model())
    with pretended_mps() as mps:
        base = base_model()
        found = learned(replace(base, model=base.model.to(mps), device=mps))
    assert found == expected
