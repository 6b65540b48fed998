"""Compute attention over a token trie, so that a prefix that rows share is computed once.

Knows token lists, tensors and transformers' attention interface; not rows of training, adapters or
losses.

Of sorted token rows, each shares some prefix with the one before it. The tokens after that prefix
are the row's *branch*; all branches, one after the other, are the trie: each distinct prefix once.
In a transformer only attention mixes tokens, so every other layer runs over the trie as if it were
one row. In attention, the queries of a branch meet the keys of their whole row, gathered from their
places in the trie; gradients of a shared prefix add up in the backward. This is exact: only the
order of floating-point sums differs from rows. A trie may continue a *stem*: tokens that all its
rows begin with, whose keys and values were computed before (``learner/stems.py``). On a GPU
``flex_attention`` does the same without gathering: with sorted rows, two comparisons tell whether a
key is on a query's path.

Shapes: P tokens of the stem, U tokens of the trie, n rows of a block, q queries and k keys per row,
H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    _mask_mod_signature,
    create_block_mask,
    flex_attention,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl_trainer.models import stem_attention
from agentrl_trainer.models.devices import moved

ATTENTION = "agentrl_trie"
"""Name of ``trie_attention`` among transformers' attention implementations."""

PADDED_SHARE = 1.25
PADDED_PAIRS = 4096
"""Rows go through attention together while padding them to one shape costs at most this share of
their query-key pairs, or this many pairs, about the cost of an empty call."""


@dataclass(eq=False, slots=True)
class Block:
    """Branches of similar shape. Padded keys come after all queries, so causality hides them."""

    queries: Tensor  # [n, q] places in the trie
    keys: Tensor  # [n, k] places in the trie, the row from its first token after the stem on
    depths: Tensor  # [n, q] the queries' positions in their rows
    causal: bool  # every branch is a whole row: an ordinary causal attention behind the stem
    before: int = 0  # P
    _masks: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])

    def mask(self, window: int | None, dtype: torch.dtype, first: int = 0) -> Tensor:
        """Return [n, 1, q, P + k - first], 0 where the query sees the key, else -inf.

        Cached for all layers. ``first``: the keys before it, which are left out.
        """
        if (window, dtype, first) not in self._masks:
            end = self.before + self.keys.shape[1]
            at = torch.arange(first, end, device=self.keys.device)
            distance = self.depths[:, None, :, None] - at
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            # Additive, not boolean: SDPA would convert it in every layer.
            zeros = torch.zeros_like(hidden, dtype=dtype)
            self._masks[window, dtype, first] = zeros.masked_fill(hidden, float("-inf"))
        return self._masks[window, dtype, first]

    def to(self, device: torch.device) -> Block:
        parts = (moved(x, device) for x in (self.queries, self.keys, self.depths))
        return Block(*parts, causal=self.causal, before=self.before)


KeysValues: TypeAlias = dict[nn.Module, tuple[Tensor, ...]]
"""By attention module: keys and values, each [1, H, tokens, D]."""


@dataclass(frozen=True, slots=True)
class Trie:
    """What attention needs of one packed trie."""

    blocks: list[Block]
    order: Tensor  # [U] place of each token among the queries of all blocks
    depths: Tensor  # [U] each token's position in its rows
    ends: Tensor  # [U] one past the last token whose row goes through this one
    flex: bool = False  # attention by ``flex_attention``, without ``blocks``
    before: int = 0  # P
    stem: KeysValues | None = None  # of the P tokens
    made: KeysValues | None = None  # gets the keys and values of the trie's own tokens
    _masks: dict[int | None, BlockMask] = field(default_factory=dict[int | None, BlockMask])

    def to(self, device: torch.device) -> Trie:
        parts = (moved(x, device) for x in (self.order, self.depths, self.ends))
        blocks = [block.to(device) for block in self.blocks]
        return Trie(blocks, *parts, flex=self.flex, before=self.before)

    def sees(self, window: int | None) -> _mask_mod_signature:
        """Return flex_attention's test whether a query sees a key.

        Rows are sorted, so the tokens whose rows go through a token are one range behind it.
        """
        depths, ends, before = self.depths, self.ends, self.before

        def see(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = key if not before else (key - before).clamp(min=0)
            path = (own <= query) & (query < ends[own])
            depth = depths[own]
            if before:
                path, depth = path | (key < before), torch.where(key < before, key, depth)
            return path if window is None else path & (depths[query] - depth < window)

        return see

    def block_mask(self, window: int | None) -> BlockMask:
        """Return ``sees`` by blocks, empty ones left out; made once for all layers."""
        if window not in self._masks:
            size = len(self.ends)
            self._masks[window] = create_block_mask(
                self.sees(window), None, None, size, self.before + size, self.ends.device,
                _compile=self.ends.is_cuda,  # else the whole [U, U] is held
            )  # fmt: skip
        return self._masks[window]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix, by bisection over slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def longer_prefix(have: Sequence[int], want: Sequence[int], best: int) -> int:
    """Return the common prefix if longer than ``best``, else 0: one comparison rules most out."""
    if len(have) <= best or len(want) <= best or have[best] != want[best]:
        return 0
    return common_prefix(have, want)


def pack_trie(
    rows: Sequence[Sequence[int]], before: int = 0
) -> tuple[list[int], list[list[int]], Trie]:
    """Make a trie of rows that are sorted and not empty.

    Args:
        before: tokens that the rows had before these, the same for all: the length of the stem.

    Returns its tokens [U]; for each row, where its tokens are among them, so that
    ``tokens[paths[b][t]]`` is token t of row b; and what attention needs.
    """
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = []
    starts: list[int] = []  # the token of the row at which its branch begins
    path: list[int] = []
    for last, row in pairwise(([], *rows)):
        shared = common_prefix(last, row)
        for left in path[shared:]:
            ends[left] = len(tokens)
        path = [*path[:shared], *range(len(tokens), len(tokens) + len(row) - shared)]
        paths.append(path)
        starts.append(shared)
        tokens.extend(row[shared:])
        depths.extend(range(before + shared, before + len(row)))
        ends.extend([0] * (len(row) - shared))
    blocks, order = _plan(starts, paths, len(tokens), before)
    after = torch.tensor([end or len(tokens) for end in ends])
    return tokens, paths, Trie(blocks, order, torch.tensor(depths), after, before=before)


def _plan(
    starts: list[int], paths: list[list[int]], size: int, before: int
) -> tuple[list[Block], Tensor]:
    blocks: list[Block] = []
    order = torch.empty(size, dtype=torch.int64)
    done = 0
    for members in _alike(starts, [len(path) for path in paths]):
        rows = [torch.tensor(paths[i]) for i in members]
        own = [row[starts[i] :] for i, row in zip(members, rows, strict=True)]
        queries, keys = (pad_sequence(x, batch_first=True) for x in (own, rows))
        first = torch.tensor([starts[i] for i in members])
        for row in own:
            order[row] = torch.arange(done, done + len(row))
            done += queries.shape[1]
        # Padded queries stay among the keys: beyond a sliding window they would see none (NaN).
        depths = (first[:, None] + torch.arange(queries.shape[1])).clamp(max=keys.shape[1] - 1)
        causal = not bool(first.any())
        blocks.append(Block(queries, keys, before + depths, causal, before))
    return blocks, order


def _alike(starts: list[int], lengths: list[int]) -> list[list[int]]:
    """Group branches, by their first depths and the lengths of their rows, so that little is
    padded. A branch without tokens of its own has no queries, and is in no group."""
    own = [length - start for start, length in zip(starts, lengths, strict=True)]
    groups: list[list[int]] = []
    width = useful = 0
    # Ordinary causal attention needs no mask and half the work, so it is kept apart.
    for i in sorted(range(len(own)), key=lambda i: (starts[i] > 0, -own[i], -lengths[i])):
        if not own[i]:
            continue
        pairs = own[i] * lengths[i]
        if groups and (starts[i] > 0) == (starts[groups[-1][0]] > 0):
            group, total = groups[-1], useful + pairs
            # The first has most queries.
            padded = (len(group) + 1) * own[group[0]] * max(width, lengths[i])
            if padded <= max(PADDED_SHARE * total, total + PADDED_PAIRS):
                group.append(i)
                width, useful = max(width, lengths[i]), total
                continue
        groups.append([i])
        width, useful = lengths[i], pairs
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
    """Implement transformers' attention interface; ``query`` [1, H, U, D], result [1, U, H, D].

    Without ``trie`` this is SDPA. With one, ``attention_mask`` is ignored.
    """
    sinks = kwargs.get("s_aux")
    by_sdpa = softcap is None and sinks is None
    if trie is None and by_sdpa:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if trie is None:
        out = explicit(query, key, value, attention_mask, scaling, softcap, sinks)
        return out.transpose(1, 2), None
    if any(kwargs.get(name) is not None for name in ("sinks", "position_bias")):
        raise ValueError("it adds biases to attention scores")
    if trie.made is not None:
        trie.made.setdefault(module, (key, value))  # a checkpointed layer comes here twice
    past = None if trie.stem is None else trie.stem[module]
    if trie.flex and sinks is None:
        if past is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(past, (key, value), strict=True))
        return _flex(query, key, value, trie, scaling, sliding_window, softcap), None
    unmasked = past is None or sliding_window is None  # attention to a stem takes no mask
    if by_sdpa and unmasked and stem_attention.applies(query, value):
        return _by_parts(query, key, value, past, trie, scaling, sliding_window), None
    # [U, H * D], of which rows are quick to gather and to add up.
    queries, keys, values = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    parts: list[Tensor] = []
    for block in trie.blocks:
        q = _gather(queries, block.queries, query)
        k, v = _gather(keys, block.keys, key), _gather(values, block.keys, value)
        if past is not None:
            pairs = zip(past, (k, v), strict=True)
            k, v = (torch.cat([x.expand(len(own), -1, -1, -1), own], 2) for x, own in pairs)
        plain = block.causal and past is None and sliding_window is None
        mask = None if plain and by_sdpa else block.mask(sliding_window, q.dtype)
        if by_sdpa:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=plain, scale=scaling, enable_gqa=True
            )
        else:
            out = explicit(q, k, v, mask, scaling, softcap, sinks)
        parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = torch.cat(parts).index_select(0, trie.order)
    return joined.view(1, len(trie.order), query.shape[1], value.shape[-1]), None


def _by_parts(
    query: Tensor, key: Tensor, value: Tensor, past: tuple[Tensor, ...] | None, trie: Trie,
    scaling: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    parts: list[stem_attention.Part] = []
    for block in trie.blocks:
        plain = block.causal and window is None
        mask = None if plain else block.mask(window, query.dtype, trie.before)
        parts.append(stem_attention.Part(block.queries, block.keys, mask))
    given = query, key, value, *(past or (None, None))
    return stem_attention.TrieAttention.apply(*given, parts, trie.order, scaling)


@functools.cache
def _kernel(device: str) -> Any:
    """Return ``flex_attention``, compiled on a GPU, where it would otherwise hold all scores."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _flex(
    query: Tensor, key: Tensor, value: Tensor, trie: Trie, scaling: float | None,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute [1, U, H, D] without gathering keys or holding a mask."""

    def capped(score: Tensor, *_places: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out = _kernel(query.device.type)(
        query, key, value, score_mod=None if softcap is None else capped,
        block_mask=trie.block_mask(window), scale=scaling, enable_gqa=True,
    )  # fmt: skip
    return out.transpose(1, 2)


def _gather(rows: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Gather [n, H, t, D] from [U, H * D] at ``places`` [n, t]."""
    found = rows.index_select(0, places.flatten())
    return found.view(*places.shape, like.shape[1], like.shape[3]).transpose(1, 2)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with what SDPA lacks; q [n, H, q, D].

    ``mask``: added to the scores, or transformers' boolean one (None: causal). ``softcap``: of
    scores (Gemma 2, arXiv:2408.00118). ``sinks`` [H]: the score of one more key without a value
    (gpt-oss, arXiv:2508.10925; "attention sinks", arXiv:2309.17453).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        mask = visible.tril(scores.shape[-1] - scores.shape[-2])
    hidden = float("-inf")
    scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside.to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights[..., : k.shape[2]] @ v


AttentionInterface.register(ATTENTION, trie_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
