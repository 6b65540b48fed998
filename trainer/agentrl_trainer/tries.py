"""Attention over a token trie: rows that begin alike are computed alike only once.

Knows token lists, tensors and transformers' attention interface; not datums, adapters or losses.

Sort rows of tokens, and each shares some prefix with the one before it. What follows that prefix is
the row's *branch*; all branches, one after the other, are the trie: each distinct prefix once.
In a transformer only attention looks beyond a token, so every other layer simply runs over the
trie as if it were one row. In attention, the queries of a branch meet the keys of their whole row,
which are gathered from wherever in the trie they were computed; gradients of a shared prefix add up
on the way back. This is exact: nothing but the order of floating-point sums differs from rows.

Shapes: U tokens of the trie, n rows of a block, q queries and k keys per row, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl_trainer.prefixes import common_prefix

ATTENTION = "agentrl_trie"
"""Name of ``trie_attention`` among transformers' attention implementations."""

PADDED_SHARE = 1.25
PADDED_PAIRS = 4096
"""Rows go through attention together as long as padding them to one shape costs at most this share
of their query-key pairs, or this many pairs: about what a call costs that does nothing."""


@dataclass(eq=False, slots=True)
class Block:
    """Branches of like shape. Padded keys come after all queries, so causality hides them."""

    queries: Tensor  # [n, q] places in the trie
    keys: Tensor  # [n, k] places in the trie, the row from its first token on
    depths: Tensor  # [n, q] the queries' positions in their rows
    causal: bool  # every branch is a whole row: an ordinary causal attention
    _masks: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, q, k], 0 where the query may look and -inf elsewhere; made once for all layers."""
        if (window, dtype) not in self._masks:
            at = torch.arange(self.keys.shape[1], device=self.keys.device)
            distance = self.depths[:, None, :, None] - at
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
            # Additive, not boolean: SDPA would convert it anew in every layer.
            self._masks[window, dtype] = zeros.masked_fill(hidden, float("-inf"))
        return self._masks[window, dtype]

    def knows_window(self, window: int | None) -> bool:
        """Whether an attention layer has come by that has it."""
        return any(known == window for known, _ in self._masks)

    def to(self, device: torch.device) -> Block:
        moved = (x.to(device, non_blocking=True) for x in (self.queries, self.keys, self.depths))
        return Block(*moved, causal=self.causal)


@dataclass(frozen=True, slots=True)
class Trie:
    """What attention has to know about one packed trie."""

    blocks: list[Block]
    order: Tensor  # [U] where each token is among the queries of all blocks

    def to(self, device: torch.device) -> Trie:
        return Trie([block.to(device) for block in self.blocks], self.order.to(device))


@dataclass(frozen=True, slots=True)
class PackedTrie:
    """Rows as one trie: ``tokens[paths[b][t]]`` is token t of row b."""

    tokens: list[int]  # [U]
    depths: list[int]  # [U] position ids
    paths: list[list[int]]  # per row, where in the trie its tokens are
    trie: Trie


def pack_trie(rows: Sequence[Sequence[int]]) -> PackedTrie:
    """One trie of rows that are sorted and not empty."""
    tokens: list[int] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    branches: list[tuple[int, int]] = []  # first place in the trie, first depth
    for at, row in enumerate(rows):
        shared = common_prefix(rows[at - 1], row) if at else 0
        own = range(len(tokens), len(tokens) + len(row) - shared)
        branches.append((len(tokens), shared))
        paths.append([*(paths[-1][:shared] if at else ()), *own])
        tokens.extend(row[shared:])
        depths.extend(range(shared, len(row)))
    return PackedTrie(tokens, depths, paths, _plan(branches, paths, len(tokens)))


def _plan(branches: list[tuple[int, int]], paths: list[list[int]], size: int) -> Trie:
    blocks: list[Block] = []
    order = torch.empty(size, dtype=torch.int64)
    done = 0
    for members in _alike(
        [(depth, len(path)) for (_, depth), path in zip(branches, paths, strict=True)]
    ):
        q = max(len(paths[i]) - branches[i][1] for i in members)
        k = max(len(paths[i]) for i in members)
        queries = torch.zeros(len(members), q, dtype=torch.int64)
        keys = torch.zeros(len(members), k, dtype=torch.int64)
        starts = torch.tensor([branches[i][1] for i in members])
        for row, i in enumerate(members):
            first, depth = branches[i]
            own = len(paths[i]) - depth
            queries[row, :own] = torch.arange(first, first + own)
            keys[row, : len(paths[i])] = torch.tensor(paths[i])
            order[first : first + own] = torch.arange(done, done + own)
            done += q
        # Padded queries stay where keys are: beyond a sliding window they would see nothing (NaN).
        depths = (starts[:, None] + torch.arange(q)).clamp(max=keys.shape[1] - 1)
        blocks.append(Block(queries, keys, depths, causal=not bool(starts.any())))
    return Trie(blocks, order)


def _alike(shapes: list[tuple[int, int]]) -> list[list[int]]:
    """Branches grouped so that little is padded. A shape is (first depth, row length).

    A branch that is nothing but shared prefix has no queries, and is in no group.
    """
    own = [length - depth for depth, length in shapes]
    order = sorted(
        (i for i in range(len(shapes)) if own[i]),
        key=lambda i: (shapes[i][0] > 0, -own[i], -shapes[i][1], i),
    )
    groups: list[list[int]] = []
    width = useful = 0
    for i in order:
        pairs = own[i] * shapes[i][1]
        if groups:
            group = groups[-1]
            height = own[group[0]]  # the first has most queries
            padded = (len(group) + 1) * height * max(width, shapes[i][1])
            # Ordinary causal attention needs no mask, and half the work: not to be mixed.
            one_kind = (shapes[i][0] > 0) == (shapes[group[0]][0] > 0)
            allowed = max(PADDED_SHARE * (useful + pairs), useful + pairs + PADDED_PAIRS)
            if one_kind and padded <= allowed:
                group.append(i)
                width, useful = max(width, shapes[i][1]), useful + pairs
                continue
        groups.append([i])
        width, useful = shapes[i][1], pairs
    return groups


def trie_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    trie: Trie | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; ``query`` [1, H, U, D] and the result [1, U, H, D].

    Without ``trie`` this is SDPA as usual. With one, ``attention_mask`` is not looked at. Raises
    NotImplementedError for what would change the result and is not known here (attention sinks,
    position biases): ``TokenLogprobs`` then uses padded rows.
    """
    if trie is None and softcap is not None:
        mask = _additive(attention_mask, query)
        return _capped(query, key, value, mask, scaling, softcap).transpose(1, 2), None
    if trie is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    queries, keys, values = (_by_token(x) for x in (query, key, value))
    parts: list[Tensor] = []
    for block in trie.blocks:
        q, k, v = (
            _gather(queries, block.queries, query),
            _gather(keys, block.keys, key),
            _gather(values, block.keys, value),
        )
        plain = block.causal and sliding_window is None
        if softcap is None:
            mask = None if plain else block.mask(sliding_window, q.dtype)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=plain, scale=scaling, enable_gqa=True
            )
        else:
            out = _capped(q, k, v, block.mask(sliding_window, q.dtype), scaling, softcap)
        parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = torch.cat(parts).index_select(0, trie.order)
    return joined.view(1, len(trie.order), query.shape[1], value.shape[-1]), None


def _by_token(states: Tensor) -> Tensor:
    """[1, H, U, D] -> [U, H * D]: gathering whole rows is quick, and so is adding them up again."""
    return states[0].transpose(0, 1).flatten(1)


def _gather(rows: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """[U, H * D] at [n, t] -> [n, H, t, D]."""
    found = rows.index_select(0, places.flatten())
    return found.view(*places.shape, like.shape[1], like.shape[3]).transpose(1, 2)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with soft-capped scores (Gemma 2, arXiv:2408.00118), which SDPA does not know."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _additive(mask: Tensor | None, query: Tensor) -> Tensor:
    """transformers' boolean mask (None: causal) as one to be added to scores."""
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask


AttentionInterface.register(ATTENTION, trie_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
