"""Forward strategies that compute all rows together, on one rectangle of keys and values.

Knows transformers' attention and masks, not requests, sampling or adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask

from agentrl_trainer.inference.kv_cache import TIME_STEP, KVRows, KVShape, Part, Rows
from agentrl_trainer.inference.prefix_cache import KV, KVPool
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.prefix_attention import trie_attention

ATTENTION = "agentrl_rows"


class BatchedForward:
    """The model's own modules over all rows at once.

    Applies if every layer has full attention and a causal mask says all that its attention needs.
    ``by_rule`` takes the model's own rule at each row's positions instead of that mask, which also
    serves sliding windows.

    Raises:
        ValueError: some layers cache something else, or keys of several shapes.
    """

    ragged = False
    """Whether rows with few new tokens beside rows with many cost no more than these tokens."""
    takes_stems = False
    """Whether rows may begin with a stem that is held once."""

    def __init__(self, base: BaseModel, options: dict[str, Any], *, by_rule: bool = False) -> None:
        self._base = base
        self._model = base.model
        self._cache = _cache_argument(base.model)
        windows = (DynamicSlidingWindowLayer,) if by_rule else ()
        self._shape = _kv_shape(base, (DynamicLayer, *windows))
        self.bytes_per_token = self._shape.bytes_per_token
        self._options = options
        self._by_rule = by_rule
        self._causal = torch.empty(0)
        self._adds_mask = not (by_rule or getattr(self._model, "_supports_sdpa", False))
        base.model.set_attn_implementation("eager" if self._adds_mask else ATTENTION)

    def new_rows(self, pool: KVPool, stem: KV | None = None, first: int = 0) -> Rows:
        return KVRows(self._shape, pool, stem, first)

    def __call__(self, parts: Sequence[Part]) -> list[Tensor]:
        """Logits ``[wanted, vocab]`` of each part, after the last token of each wanted chunk."""
        return [self._wanted(part) for part in parts]

    def _wanted(self, part: Part) -> Tensor:
        logits = self._logits(part.rows, *self._prepare(part))
        return logits if part.wanted is None else logits[part.wanted]

    def _prepare(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return token ids and positions ``[batch, new]``, and have the rows expect them.

        Shorter chunks are padded by *repeating their last token at its own position*: it
        overwrites itself with the same keys, and the last column holds every row's last token.
        """
        if all(len(chunk) == 1 for chunk in part.chunks):
            ids, places = part.chunks, [[start] for start in part.starts]
        else:
            ids, places = _padded(part.chunks, part.starts)
        token_ids, positions = torch.tensor([ids, places], device=self._base.device)
        end = max([at[-1] for at in places]) + 1
        cast(KVRows, part.rows).begin(positions, -(-end // TIME_STEP) * TIME_STEP)
        return token_ids, positions

    def _logits(self, rows: Rows, ids: Tensor, positions: Tensor) -> Tensor:
        rows, token = cast(KVRows, rows), _positions.set(positions)
        try:
            out = self._model(
                input_ids=ids,
                attention_mask=None if self._by_rule else self._mask(positions, rows.view),
                position_ids=positions,
                use_cache=True,
                **{self._cache: rows},
                **self._options,
            )
        finally:
            _positions.reset(token)
        return out.logits[:, -1]

    def _mask(self, positions: Tensor, view: int) -> Tensor:
        """Causal mask ``[batch, 1, new, view]``, cut out of one run of *seen*, then *unseen*."""
        if (reach := len(self._causal) // 2) < view:
            reach = 2 * view
            dtype = self._base.dtype if self._adds_mask else torch.bool
            seen, unseen = (0.0, torch.finfo(dtype).min) if self._adds_mask else (True, False)
            self._causal = torch.full((2 * reach,), unseen, dtype=dtype, device=self._base.device)
            self._causal[:reach] = seen
        windows = self._causal.unfold(0, view, 1).index_select(0, reach - 1 - positions.flatten())
        return windows.view(len(positions), 1, -1, view)


def _cache_argument(model: PreTrainedModel) -> str:
    """Return what ``forward`` calls its cache; transformers 5.24 deprecates the older name."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _padded(chunks: list[list[int]], starts: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and positions, each ``[batch][longest chunk]``."""
    longest = max(map(len, chunks))
    ids = [[*chunk, *[chunk[-1]] * (longest - len(chunk))] for chunk in chunks]
    spans = [(at, at + len(chunk)) for at, chunk in zip(starts, chunks, strict=True)]
    places = [[*range(at, end), *[end - 1] * (longest - end + at)] for at, end in spans]
    return ids, places


def _kv_shape(base: BaseModel, allowed: tuple[type, ...]) -> KVShape:
    """Learn what the model caches by running one token."""
    cache = DynamicCache(config=base.model.config)
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in allowed})
    if odd:
        raise ValueError(f"it has layers of {', '.join(odd)}")
    token = torch.zeros(1, 1, dtype=torch.long, device=base.device)
    base.model(token, use_cache=True, **{_cache_argument(base.model): cache})
    found = {
        (tuple(keys.shape), tuple(values.shape), keys.dtype)
        for keys, values, *_ in cache
        if keys is not None and values is not None
    }
    if len(found) != 1:
        shapes = ", ".join(sorted(map(str, found))) or "nothing"
        raise ValueError(f"its layers do not all cache the same shape: {shapes}")
    ((_, heads, _, key_dim), (_, _, _, value_dim), dtype) = found.pop()
    return KVShape(len(cache.layers), heads, key_dim, value_dim, dtype, base.device)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA that never copies the cache for one new token per row.

    transformers repeats keys and values for grouped-query attention whenever there is a mask: at a
    batch of 64 and 1,000 tokens that copy costs nine times the attention. With a single query the
    heads of a group can stand in for query positions instead. Query ``[batch, heads, new, dim]``.
    """
    batch, heads, new, dim = query.shape
    odd = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if new != 1 or odd or kwargs.get("position_bias") is not None:
        return trie_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(batch, 1, heads, value.shape[-1]), None


_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)
"""``[batch, new]`` of the tokens that the model computes now."""


def _mask_by_rule(
    batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> Tensor | None:
    """``[batch, 1, new, view]``: the layer's own rule (a window, say) at each row's positions.

    transformers passes the rule of each kind of layer, but one position for all rows.
    """
    positions = _positions.get()
    if positions is None:
        return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
    device = positions.device
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    keys = torch.arange(kv_length, device=device)[None, None, None]
    seen = kwargs["mask_function"](rows, heads, positions[:, None, :, None], keys)
    return seen.expand(batch_size, 1, q_length, kv_length)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask_by_rule)
