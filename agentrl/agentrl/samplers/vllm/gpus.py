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
    """Return the CUDA_VISIBLE_DEVICES of each server: an equal part, or empty where GPUs are too
    few for that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in visible.split(",") if name]
    names = names or [str(gpu) for gpu in range(torch.cuda.device_count())]
    each = len(names) // servers if servers > 1 else 0
    return [",".join(names[i * each : (i + 1) * each]) for i in range(servers)]


def memory_share(config: ModelCommand, device: torch.device) -> float:
    """Return what of a GPU's memory vLLM may take: what the trainer, by estimate, leaves.

    While vLLM can sleep, the trainer's activations are not there when it is awake.
    """
    if not isinstance(config, TrainConfig):
        return _ALONE
    model, learning = config.model, config.learning
    how = {"rank": learning.rank, "device": device, "dtype": model.dtype,
           "gradient_checkpointing": learning.gradient_checkpointing}  # fmt: skip
    parts = estimate_memory(
        model.name, cached=0, adapters=len(config.trained), **how,
        tokens=learning.micro_batch_tokens or fitting_token_budget(model.name, **how),
        parts=learning.trainers if learning.shard_base else 1,
    )  # fmt: skip
    if parts is None:
        return _UNKNOWN
    awake = config.sampler.vllm.sleep
    held = sum(size for name, size in parts.items() if not (awake and "activations" in name))
    total = torch.cuda.get_device_properties(device).total_memory
    return round(min(_ALONE, max(0.1, 1 - _UNUSED - held / total)), 2)
