"""Which GPUs vLLM servers get, and how much of them. No GPU: the decisions alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from settings import nested

from agentrl.config.commands import ServeConfig, TrainConfig
from agentrl.samplers.vllm.gpus import gpus_of_servers, memory_share


@pytest.mark.parametrize(
    ("visible", "count", "servers", "gpus"),
    [
        ("", 4, 2, ["0,1", "2,3"]),
        ("5,7", 8, 2, ["5", "7"]),
        ("", 4, 3, ["0", "1", "2"]),
        ("", 4, 1, [""]),  # all of them: for --tensor-parallel-size
        ("", 1, 2, ["0", "0"]),
        ("3,5", 8, 3, ["3", "5", "3"]),
        ("", 0, 2, ["", ""]),
    ],
)
def test_servers_get_equal_parts(
    visible: str, count: int, servers: int, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert gpus_of_servers(servers) == gpus


def test_vllm_gets_what_the_trainer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(gib: float, verl_nodes: int = 0, **settings: Any) -> float:
        memory = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        settings = {"micro_batch_tokens": 4096} | settings
        given = nested(agent="json:loads", tasks="t", **settings)
        config = TrainConfig.model_validate(given)
        if verl_nodes:  # not validated: verl need not be installed
            config.run.backend, config.verl.nodes = "verl", verl_nodes
        return memory_share(config, torch.device("cuda"), 1)

    assert share(80.0) == 0.9  # agentrl-tiny
    small, large = share(0.5), share(2.0)
    assert 0.1 <= small < large < 0.9
    assert share(0.5, sampler="vllm", **{"sampler.vllm.sleep": True}) > small
    eight = {"trainers": 8, "micro_batch_tokens": 64}  # few: it is the weights that are spread
    whole, spread = share(0.04, **eight), share(0.04, shard_base=True, **eight)
    assert 0.1 < whole < spread == share(0.04, verl_nodes=1, **eight) < 0.9
    assert share(0.04, verl_nodes=8, **eight) < whole  # one worker a node, with PEFT's activations
    assert share(0.01) == 0.1
    assert memory_share(ServeConfig(), torch.device("cuda"), 1) == 0.9
    assert memory_share(ServeConfig(), torch.device("cuda"), 3) == 0.3  # they share the GPU
