"""How many tokens of keys and values a machine has room for."""

from __future__ import annotations

import os

import torch

from agentrl_trainer.inference.kv_cache import KVShape

_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 * 2**30
_GPU_SHARE = 0.6


def default_budget(shape: KVShape, context_length: int) -> int:
    """Tokens: a share of the memory free now, and never less than one full context."""
    if shape.device.type == "cuda":
        free = torch.cuda.mem_get_info(shape.device)[0] * _GPU_SHARE
    else:
        free = min(_free_cpu_bytes() * _CPU_SHARE, _CPU_MOST_BYTES)
    return max(int(free // shape.bytes_per_token), context_length)


def _free_cpu_bytes() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        # Not a system that says (macOS, Windows).
        return float(4 * _CPU_MOST_BYTES)
