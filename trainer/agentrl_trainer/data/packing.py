"""Pack training rows into micro-batches under a token budget.

Knows token lists and tensors, not models. A micro-batch is a token trie: a prefix that rows share
(a group's prompt, a conversation's turns) goes through the model once. For models that cannot
compute tries it is rows padded on the right: under causal attention no token sees the padding, so
there is no attention mask.

Shapes: B rows and N trained tokens of the micro-batch (flat, row by row); U unique tokens, or T
columns of padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.models.devices import moved
from agentrl_trainer.models.prefix_attention import Trie, common_prefix, pack_trie

_LITTLE = 0.02
"""The share of a trie's tokens that may be computed again to make it smaller."""
_KEYS_PER_TOKEN = 4
"""Keys and values that a micro-batch may hold for each token of its budget."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one adapter. Row b is ``source[indices[b]]`` before its last trained token."""

    adapter: str
    indices: list[int]  # [B] positions in the list that was packed
    input_ids: Tensor  # [1, U] int64, or [B, T]
    trie: Trie | None  # None: padded rows
    places: Tensor  # [N] in ``input_ids.flatten()``: what predicts the trained token
    rows: Tensor  # [N] the row of the trained token, with ``columns``: its position there, less one
    columns: Tensor  # [N]
    targets: Tensor  # [N] the trained tokens
    logprobs: Tensor  # [N] float32, q
    advantages: Tensor  # [N] float32
    temperatures: Tensor | None = None  # [N] float32; None: 1 everywhere

    def to(self, device: torch.device) -> MicroBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        there = {name: moved(value, device) for name, value in tensors.items()}
        return replace(self, trie=self.trie and self.trie.to(device), **there)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that the model has to compute, of the parts of rows that train something."""

    total: int  # of all rows, each by itself
    unique: int  # of one trie of all rows of an adapter
    fed: int  # through the model: prefixes again in each micro-batch, padding included

    @property
    def saved(self) -> int:
        return self.total - self.fed


def count_tokens(
    source: Sequence[TrainingRow], batches: Sequence[MicroBatch] | None = None
) -> TokenCounts:
    """Count the tokens of rows, and of what ``pack`` made of them; None: each row is computed by
    itself."""
    rows = _rows(source)
    total = sum(len(row.tokens) for row in rows)
    fed = total if batches is None else sum(batch.input_ids.numel() for batch in batches)
    return TokenCounts(total=total, unique=sum(_branch_lengths(rows)), fed=fed)


def pack(
    source: Sequence[TrainingRow],
    *,
    token_budget: int,
    enough: int | None = None,
    share: bool = True,
) -> list[MicroBatch]:
    """Make micro-batches of at most ``token_budget`` tokens, or of a single row.

    Deterministic. Rows that train nothing are left out. Longest first, so that running out of
    memory happens at once or not at all.

    Args:
        enough: tokens that keep the device busy: a larger trie ends before a row that shares
            almost nothing with it.
        share: make tries of about equal size, as few as the budget allows; else padded rows of
            similar length.
    """
    rows = _rows(source)
    if share:
        chunks = _balanced_chunks(rows, token_budget, enough or token_budget)
        chunks.sort(key=lambda chunk: -sum(_branch_lengths(chunk)))
    else:
        chunks = _padded_chunks(rows, token_budget)
    return [_micro_batch(source, chunk, share) for chunk in chunks]


class _Row(NamedTuple):
    """The part of a training row that goes through the model: what predicts trained tokens."""

    adapter: str
    tokens: list[int]
    place: int  # of the training row


def _rows(source: Sequence[TrainingRow]) -> list[_Row]:
    """Select the rows that train something, sorted so that neighbors share the longest prefixes."""
    rows: list[_Row] = []
    for index, row in enumerate(source):
        last = next((at for at in range(len(row.mask) - 1, 0, -1) if row.mask[at]), 0)
        if last:
            rows.append(_Row(row.adapter, row.tokens[:last], index))
    return sorted(rows)


def _branch_lengths(rows: Sequence[_Row]) -> list[int]:
    """Count the tokens that each of the sorted rows adds to a trie of those before it."""
    shared = [
        common_prefix(before.tokens, row.tokens) if before.adapter == row.adapter else 0
        for before, row in pairwise(rows)
    ]
    return [len(row.tokens) - known for row, known in zip(rows, [0, *shared], strict=False)]


def _balanced_chunks(rows: Sequence[_Row], budget: int, enough: int) -> list[list[_Row]]:
    """Cut rows into as few chunks as the budget allows, then find the smallest budget that makes
    no more of them: chunks of about equal size."""
    added = _branch_lengths(rows)

    def cut(limit: int) -> list[list[_Row]]:
        chunks: list[list[_Row]] = []
        size = keys = 0
        for row, more in zip(rows, added, strict=True):
            fits = chunks and chunks[-1][-1].adapter == row.adapter and size + more <= limit
            if size >= enough and len(row.tokens) - more <= _LITTLE * size:
                fits = False
            # Attention gathers the keys of each row's whole path, shared tokens too.
            keys += len(row.tokens)
            if fits and keys <= _KEYS_PER_TOKEN * budget:
                chunks[-1].append(row)
                size += more
            else:
                # A new micro-batch has to compute the shared prefix again.
                chunks.append([row])
                size = keys = len(row.tokens)
        return chunks

    best = cut(budget)
    low, high = 0, budget  # ``low`` makes more chunks than ``best``, ``high`` does not
    while high - low > 1:
        middle = (low + high) // 2
        if len(chunks := cut(middle)) <= len(best):
            best, high = chunks, middle
        else:
            low = middle
    return best


def _padded_chunks(rows: Sequence[_Row], budget: int) -> list[list[_Row]]:
    chunks: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: (row.adapter, -len(row.tokens), row.place)):
        longest = chunks[-1][0] if chunks else row  # the first of a chunk, which sets its width
        fits = chunks and len(longest.tokens) * (len(chunks[-1]) + 1) <= budget
        if fits and longest.adapter == row.adapter:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _micro_batch(source: Sequence[TrainingRow], chunk: Sequence[_Row], share: bool) -> MicroBatch:
    if share:
        tokens, places, trie = pack_trie([row.tokens for row in chunk])
        input_ids = [tokens]
    else:
        width = max(len(row.tokens) for row in chunk)
        input_ids = [row.tokens + [0] * (width - len(row.tokens)) for row in chunk]
        places = [range(row * width, (row + 1) * width) for row in range(len(chunk))]
        trie = None
    # ``places[b][t]``: the place of token t of row b in the flat ``input_ids``.
    own = [source[row.place] for row in chunk]
    trained = [(row, at) for row, one in enumerate(own) for at, on in enumerate(one.mask) if on]

    def floats(columns: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([columns[row][at] for row, at in trained], dtype=torch.float32)

    temperatures = None
    if any("temperature" in row.extra for row in own):
        temperatures = floats(
            [row.extra.get("temperature") or [1.0] * len(row.mask) for row in own]
        )
    return MicroBatch(
        adapter=chunk[0].adapter,
        indices=[row.place for row in chunk],
        input_ids=torch.tensor(input_ids),
        trie=trie,
        places=torch.tensor([places[row][at - 1] for row, at in trained]),
        rows=torch.tensor([row for row, _ in trained]),
        columns=torch.tensor([at - 1 for _, at in trained]),
        targets=torch.tensor([own[row].tokens[at] for row, at in trained]),
        logprobs=floats([row.logprobs for row in own]),
        advantages=floats([row.advantages for row in own]),
        temperatures=temperatures,
    )
