"""Shrink a model's attention windows, so that a comparison over a few tokens shows their effect.

Two ways to compute a model are compared over short rows. A window of 4,096 tokens would have no
effect there, and a way that ignores it would pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_NAMES = (
    "sliding_window",
    "attention_chunk_size",  # Llama 4
    "index_topk",  # DeepSeek 3.2: keys that a query sees
    "floor_scale",  # Llama 4: positions from which on queries are scaled
    "keep_window_size",  # Doge
    "window_size",
)
_SHORT = 8


@contextlib.contextmanager
def shrunk_windows(model: nn.Module) -> Iterator[None]:
    """Set windows and the like to 8 tokens, in modules, configurations and stored masks (GPT-Neo).

    For comparisons only, and for one thread: the model computes something else meanwhile.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def change(own: dict[str, Any], name: str, value: Any) -> None:
        changed.append((own, name, own[name]))
        own[name] = value

    found = {id(x): vars(x) for m in model.modules() for x in (m, getattr(m, "config", None)) if x}
    for own in found.values():
        for name in _NAMES:
            value = own.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > _SHORT:
                change(own, name, type(value)(_SHORT))
    for module in model.modules():
        masks = vars(module)["_buffers"]
        for name, mask in list(masks.items()):
            if mask is None or mask.dtype != torch.bool or mask.ndim < 2:
                continue
            square = mask.shape[-1] == mask.shape[-2] > _SHORT
            if square and not bool(mask[..., -1, 0].any()):  # the last does not see the first
                change(masks, name, mask & torch.ones_like(mask).triu(1 - _SHORT))
    try:
        yield
    finally:
        for own, name, value in changed:
            own[name] = value
