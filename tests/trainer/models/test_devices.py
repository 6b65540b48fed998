"""Devices: which one is chosen, and what CUDA and MPS change, as far as a CPU can show it."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from psutil import Process
from small_learner import base_model

from agentrl_trainer.checkpoint import capture_rng, restore_rng
from agentrl_trainer.inference.kv_cache import default_budget
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.devices import (
    choose_device,
    free_memory,
    moved,
    return_freed_memory,
    return_large_tensors,
)
from agentrl_trainer.models.host_memory import left_in_container
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
    base = base_model()
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


def test_free_memory_knows_the_machine_and_its_container(tmp_path: Path) -> None:
    assert 2**26 < free_memory(torch.device("cpu")) < 2**50
    assert left_in_container(tmp_path) is None
    for name, text in {"max": "1000", "current": "700", "stat": "inactive_file 200\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert left_in_container(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert left_in_container(tmp_path) is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("token_budget", [4096, 1024])
@pytest.mark.parametrize("of", ["process", "learner"])
def test_large_tensors_go_back_to_the_system(of: str, token_budget: int) -> None:
    if of == "process":
        return_large_tensors(torch.device("cpu"), token_budget)
    else:
        Learner(base_model(), token_budget=token_budget)
    torch.ones(2**22)  # else glibc would keep tensors up to this size from now on
    return_freed_memory()  # what earlier tests left
    before = Process().memory_info().rss
    large, between = [], []
    for _ in range(50):
        large.append(torch.ones(2**20))  # 4 MiB
        between.append(torch.ones(2**18))  # 1 MiB
    assert Process().memory_info().rss > before + 240 * 2**20
    large.clear()
    assert Process().memory_info().rss < before + 60 * 2**20
    del between[:-1]
    if token_budget == 4096:  # between is not large
        assert Process().memory_info().rss > before + 40 * 2**20
        return_freed_memory()
    assert Process().memory_info().rss < before + 20 * 2**20


def faults_of_tensors(setup: str) -> int:
    """Page faults of tensors that are freed at once, in a process that does this before."""
    code = f"""
import resource, torch
from agentrl_trainer.models.devices import *
cpu = torch.device("cpu")
{setup}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(2**21) for _ in range(4)]  # 8 MiB each
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_a_sampler_frees_is_taken_again() -> None:
    kept = faults_of_tensors("keep_freed_tensors(cpu)")
    returned = faults_of_tensors("return_large_tensors(cpu, 4096); keep_freed_tensors(cpu)")
    assert 10 * kept < returned
