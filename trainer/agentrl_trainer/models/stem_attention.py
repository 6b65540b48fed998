"""Attention over a trie on a CPU, which holds neither scores nor the keys that it gathers.

Knows tensors, places in a trie and torch's flash attention (arXiv:2307.08691); not tries or models.

Rows are gathered from the trie in parts, and gathered again for the backward, because a key is
gathered for every row that it is part of. All tokens of a trie see the whole stem, if there is one,
so that part needs no mask and no gathering. What they see of each other is a second attention. Both
give the logarithm of the mass of their weights, by which their results are merged; the backward of
each only needs the merged result and mass.

Shapes: P tokens of the stem, U tokens of the trie, n rows of a part, q queries and k keys per row,
H heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""Attention of queries [n, H, q, D] over [n, G, k, D]; returns the logarithms of the weights' sums
[n, H, q] too. It is private to torch and may disappear; then stems are gathered."""
_flash_back: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)
available = _flash is not None and _flash_back is not None


class Part(NamedTuple):
    """Rows of similar shape, by the places of their tokens in the trie."""

    queries: Tensor  # [n, q]
    keys: Tensor  # [n, k]
    mask: Tensor | None  # [n, 1, q, k], added to scores; None: causal


def applies(query: Tensor, value: Tensor) -> bool:
    return available and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


class TrieAttention(torch.autograd.Function):
    """Compute [1, U, H, D] of queries [1, H, U, D], and keys and values [1, G, U or P, D].

    ``order`` [U]: the place of each token among the queries of all parts. Without a stem, its keys
    and values are None.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, stem_keys: Tensor | None,
        stem_values: Tensor | None, parts: Sequence[Part], order: Tensor, scale: float | None,
    ) -> Tensor:  # fmt: skip
        found: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            causal = part.mask is None
            q, k, v = _gathered(part, query, key, value)
            pair = _flash(q, k, v, 0.0, causal, attn_mask=part.mask, scale=scale)
            found.append(tuple(x.transpose(1, 2).flatten(0, 1) for x in pair))
        out, mass = (torch.cat(x).index_select(0, order) for x in zip(*found, strict=True))
        if stem_keys is not None:
            pair = _flash(query, stem_keys, stem_values, scale=scale)
            seen, seen_mass = (x[0].transpose(0, 1) for x in pair)  # [U, H, D], [U, H]
            share = torch.sigmoid(seen_mass - mass)[..., None]
            out.lerp_(seen, share.to(out.dtype))  # a mass is float32 in half precision, too
            mass = torch.logaddexp(seen_mass, mass)
        ctx.save_for_backward(query, key, value, stem_keys, stem_values, out, mass)
        ctx.parts, ctx.order, ctx.scale = parts, order, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *ours, stem_keys, stem_values, out, mass = ctx.saved_tensors
        given, scale = (grads[0][0], out, mass), ctx.scale
        of_query, of_stem = None, (None, None)
        if stem_keys is not None:
            whole = (x.transpose(0, 1)[None] for x in given)
            arguments = _arguments(whole, ours[0], stem_keys, stem_values)
            of_query, *of_stem = _flash_back(*arguments, 0.0, False, scale=scale)
        size = sum(part.queries.numel() for part in ctx.parts)
        # An infinite mass gives padded queries weights of 0.
        padded = [
            x.new_full((size, *x.shape[1:]), fill).index_copy_(0, ctx.order, x)
            for x, fill in zip(given, (0.0, 0.0, float("inf")), strict=True)
        ]
        sums = [torch.zeros_like(_rows(x)) for x in ours]
        start = 0
        for part in ctx.parts:
            shape, end = part.queries.shape, start + part.queries.numel()
            own = (x[start:end].unflatten(0, shape).transpose(1, 2) for x in padded)
            arguments = _arguments(own, *_gathered(part, *ours))
            slopes = _flash_back(
                *arguments, 0.0, part.mask is None, attn_mask=part.mask, scale=scale
            )
            places = (part.queries, part.keys, part.keys)
            for total, at, slope in zip(sums, places, slopes, strict=True):
                total.index_add_(0, at.flatten(), slope.transpose(1, 2).flatten(2).flatten(0, 1))
            start = end
        of_ours = [x.view(x.shape[0], like.shape[1], -1).transpose(0, 1)[None]
                   for x, like in zip(sums, ours, strict=True)]  # fmt: skip
        if of_query is not None:
            of_ours[0] += of_query
        return *of_ours, *of_stem, None, None, None


def _arguments(given: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Order what the backward takes: the gradient, queries, keys, values, result and mass."""
    grad, out, mass = given
    return grad, *tensors, out, mass


def _rows(x: Tensor) -> Tensor:
    """Return [1, H, U, D] as [U, H * D], of which rows are quick to gather and to add up."""
    return x[0].transpose(0, 1).flatten(1)


def _gathered(part: Part, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Gather [n, H, q or k, D]."""
    places = (part.queries, part.keys, part.keys)
    return [
        _rows(x).index_select(0, at.flatten()).view(*at.shape, x.shape[1], -1).transpose(1, 2)
        for x, at in zip((query, key, value), places, strict=True)
    ]
