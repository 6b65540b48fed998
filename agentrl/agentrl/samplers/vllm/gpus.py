"""Which GPUs a vLLM server gets, and how much of their memory. Never run on a GPU."""

from __future__ import annotations

import os

import torch

from agentrl.config.commands import ModelCommand, TrainConfig
from agentrl_trainer.memory import estimate_memory, fitting_token_budget

_ALONE = 0.9
"""vLLM's own default."""
_UNKNOWN = 0.5
"""Where the trainer's share cannot be estimated."""
_UNUSED = 0.05
"""For CUDA itself, in each process."""


def gpus_of_servers(servers: int) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of each server: an equal part, or one that servers share;
    empty for all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in visible.split(",") if name]
    names = names or [str(gpu) for gpu in range(torch.cuda.device_count())]
    if 0 < len(names) < servers:
        return [names[i % len(names)] for i in range(servers)]
    each = len(names) // servers if servers > 1 else 0
    return [",".join(names[i * each : (i + 1) * each]) for i in range(servers)]


def memory_share(config: ModelCommand, device: torch.device, servers: int) -> float:
    """Return what of a GPU's memory a vLLM server may take: what the trainer, by estimate, leaves,
    in equal parts where several servers share a GPU.

    With sleep mode, the trainer's activations are not there when vLLM is awake.
    """
    on_a_gpu = -(-servers // max(1, torch.cuda.device_count()))
    return round(_free_share(config, device) / on_a_gpu, 2)


def _free_share(config: ModelCommand, device: torch.device) -> float:
    if not isinstance(config, TrainConfig):
        return _ALONE
    model, learning = config.model, config.learning
    how = {"rank": learning.rank, "device": device, "dtype": model.dtype,
           "gradient_checkpointing": learning.gradient_checkpointing}  # fmt: skip
    parts = estimate_memory(
        model.name, cached=0, adapters=len(config.trained), **how,
        tokens=learning.micro_batch_tokens or fitting_token_budget(model.name, **how),
        parts=config.parts_of_base,
    )  # fmt: skip
    if parts is None:
        return _UNKNOWN
    sleeps = config.sampler.vllm.sleep
    held = sum(size for name, size in parts.items() if not (sleeps and "activations" in name))
    total = torch.cuda.get_device_properties(device).total_memory
    return min(_ALONE, max(0.1, 1 - _UNUSED - held / total))
