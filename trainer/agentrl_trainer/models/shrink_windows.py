"""Lengths from which on a model does something else, brought down so that a short row shows it.

Knows attributes of transformers' models. Whoever compares two ways to compute a model does so over
a few tokens; a window of 4,096 would never be seen there, nor that one of the ways forgets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = (
    "sliding_window",
    "attention_chunk_size",  # Llama 4
    "index_topk",  # DeepSeek 3.2: keys that a query sees
    "floor_scale",  # Llama 4: positions from which on queries are scaled
    "keep_window_size",  # Doge
    "window_size",
)
_LOW = 8


@contextlib.contextmanager
def lowered(model: nn.Module) -> Iterator[None]:
    """Within: windows and the like are of 8 tokens, wherever modules and configurations say them,
    or have them ready as a mask (GPT-Neo).

    For comparisons only, and for one thread: the model computes something else meanwhile.
    """
    holders: dict[int, Any] = {}
    for module in model.modules():
        holders[id(module)] = module
        config = getattr(module, "config", None)
        if config is not None:
            holders[id(config)] = config
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for holder in holders.values():
        own = vars(holder)
        for name in _NAMES:
            value = own.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > _LOW:
                changed.append((own, name, value))
                own[name] = type(value)(_LOW)
    for module in model.modules():
        masks = vars(module)["_buffers"]
        for name, mask in list(masks.items()):
            if mask is not None and _is_window(mask):
                changed.append((masks, name, mask))
                masks[name] = mask & torch.ones_like(mask).triu(1 - _LOW)
    try:
        yield
    finally:
        for own, name, value in changed:
            own[name] = value


def _is_window(mask: Tensor) -> bool:
    """Whether it says of every two positions if one sees the other, and the last not the first."""
    square = mask.dtype == torch.bool and mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2] > _LOW
    return square and not bool(mask[..., -1, 0].any())
