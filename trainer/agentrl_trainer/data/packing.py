"""Pack training rows into micro-batches under a token budget.

Knows token lists and tensors, not models. A micro-batch is a token trie: a prefix that rows share
(a group's prompt, a conversation's turns) goes through the model once. What rows share that do not
fit into one micro-batch is a *stem*, which is computed once before them. For models that cannot
compute tries it is rows padded on the right: under causal attention no token sees the padding, so
there is no attention mask.

Shapes: B rows and N trained tokens of the micro-batch (flat, row by row); U unique tokens, or T
columns of padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
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
_SHORTEST_STEM = 64
"""Fewer tokens that micro-batches share are computed in each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """Tokens that all rows of some micro-batches begin with, before the first that trains."""

    adapter: str
    tokens: list[int]  # those after the parent's
    parent: Stem | None = None

    @property
    def end(self) -> int:
        """The tokens of the rows up to its last one."""
        return len(self.tokens) + (0 if self.parent is None else self.parent.end)

    def path(self) -> list[Stem]:
        """Return the stem after all that it continues."""
        return [*(() if self.parent is None else self.parent.path()), self]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one adapter. Row b is ``source[indices[b]]`` before its last trained token, and
    after the stem."""

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
    stem: Stem | None = None

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
    fed: int  # through the model: short prefixes again in each micro-batch, padding included
    recomputed: int = 0  # through the model a second time, for the backward; not in ``fed``

    @property
    def saved(self) -> int:
        return self.total - self.fed


def count_tokens(
    source: Sequence[TrainingRow],
    batches: Sequence[MicroBatch] | None = None,
    *,
    recomputed: int = 0,
) -> TokenCounts:
    """Count the tokens of rows, and of what ``pack`` made of them; None: each row is computed by
    itself."""
    rows = _rows(source)
    total = sum(len(row.tokens) for row in rows)
    fed = total if batches is None else sum(batch.input_ids.numel() for batch in batches)
    stems = {stem for batch in batches or () if batch.stem for stem in batch.stem.path()}
    fed += sum(len(stem.tokens) for stem in stems)
    return TokenCounts(total, sum(_branch_lengths(rows)), fed, recomputed)


def pack(
    source: Sequence[TrainingRow],
    *,
    token_budget: int,
    enough: int | None = None,
    share: bool = True,
    stems: bool = True,
) -> list[MicroBatch]:
    """Make micro-batches of at most ``token_budget`` tokens, or of a single row, besides stems.

    Deterministic. Rows that train nothing are left out. Micro-batches of one stem follow each
    other. Else longest first, so that running out of memory happens at once or not at all.

    Args:
        enough: tokens that keep the device busy: a larger trie ends before a row that shares
            almost nothing with it.
        share: make tries of about equal size, as few as the budget allows; else padded rows of
            similar length.
        stems: compute long prefixes that micro-batches share once, not in each of them.
    """
    rows = _rows(source)
    if share:
        families: list[list[_Chunk]] = []
        for _, own in groupby(rows, key=lambda row: row.adapter):
            if stems:
                families += _families([*own], None, token_budget, enough or token_budget)
            else:
                chunks = _balanced_chunks([*own], 0, token_budget, enough or token_budget)
                families += [[_Chunk(chunk, None)] for chunk in chunks]
        families.sort(key=lambda family: -max(chunk.size for chunk in family))
        chunks = [chunk for family in families for chunk in family]
    else:
        chunks = [_Chunk(rows, None) for rows in _padded_chunks(rows, token_budget)]
    return [_micro_batch(source, chunk, share) for chunk in chunks]


def split_rows(source: Sequence[TrainingRow], parts: int) -> list[list[int]]:
    """Split rows, by index, into parts of about equal numbers of unique tokens.

    Deterministic. Rows with long common prefixes stay together but at the borders of parts. Rows
    that train nothing are of the first part.
    """
    rows = _rows(source)
    sizes = _branch_lengths(rows)
    total, before = max(sum(sizes), 1), 0
    found: list[list[int]] = [[] for _ in range(parts)]
    for row, size in zip(rows, sizes, strict=True):
        middle = (before + size / 2) / total  # 1 of a copy of the last row
        found[min(int(middle * parts), parts - 1)].append(row.place)
        before += size
    taken = {row.place for row in rows}
    found[0] += [index for index in range(len(source)) if index not in taken]
    return found


class _Row(NamedTuple):
    """The part of a training row that goes through the model: what predicts trained tokens."""

    adapter: str
    tokens: list[int]
    place: int  # of the training row
    silent: int  # tokens before the one that predicts its first trained token


class _Chunk(NamedTuple):
    """Rows of a micro-batch, and the stem that they continue."""

    rows: Sequence[_Row]
    stem: Stem | None

    @property
    def start(self) -> int:
        return 0 if self.stem is None else self.stem.end

    @property
    def size(self) -> int:
        return sum(_branch_lengths(self.rows, self.start))


def _rows(source: Sequence[TrainingRow]) -> list[_Row]:
    """Select the rows that train something, sorted so that neighbors share the longest prefixes."""
    rows: list[_Row] = []
    for index, row in enumerate(source):
        last = next((at for at in range(len(row.mask) - 1, 0, -1) if row.mask[at]), 0)
        if last:
            silent = row.mask.index(True, 1) - 1
            rows.append(_Row(row.adapter, row.tokens[:last], index, silent))
    return sorted(rows)


def _branch_lengths(rows: Sequence[_Row], start: int = 0) -> list[int]:
    """Count the tokens that each of the sorted rows adds to a trie of those before it.

    Args:
        start: the tokens of all rows that are no part of the trie.
    """
    shared = [
        common_prefix(before.tokens, row.tokens) if before.adapter == row.adapter else 0
        for before, row in pairwise(rows)
    ]
    return [len(row.tokens) - known for row, known in zip(rows, [start, *shared], strict=False)]


def _families(
    rows: Sequence[_Row], stem: Stem | None, budget: int, enough: int
) -> list[list[_Chunk]]:
    """Cut rows of one adapter, all behind a stem, into chunks. Those of a list share a stem.

    What the rows share that do not fit into one chunk becomes a stem. It ends before any token
    that trains: losses of whole sequences need all trained tokens of a row in one micro-batch.
    """
    whole = _Chunk(rows, stem)
    start, found, small = whole.start, list[list[_Chunk]](), rows
    if whole.size > budget:
        shared = common_prefix(rows[0].tokens, rows[-1].tokens)
        shared = min([shared, *(row.silent for row in rows)])
        if shared - start >= _SHORTEST_STEM:
            longer = Stem(rows[0].adapter, rows[0].tokens[start:shared], stem)
            return [[chunk for one in _families(rows, longer, budget, enough) for chunk in one]]
        small = list[_Row]()
        for own in _subtrees(rows, start + _SHORTEST_STEM):
            if len(own) < len(rows) and _Chunk(own, stem).size > budget:
                found += _families(own, stem, budget, enough)
            else:
                small += own
    chunks = _balanced_chunks(small, start, budget, enough)
    return [*found, *([_Chunk(chunk, stem)] for chunk in chunks)]


def _subtrees(rows: Sequence[_Row], depth: int) -> list[list[_Row]]:
    """Split sorted rows where neighbors share fewer than ``depth`` tokens."""
    found = [[rows[0]]]
    for last, row in pairwise(rows):
        if common_prefix(last.tokens, row.tokens) < depth:
            found.append([])
        found[-1].append(row)
    return found


def _balanced_chunks(
    rows: Sequence[_Row], start: int, budget: int, enough: int
) -> list[list[_Row]]:
    """Cut rows into as few chunks as the budget allows, then find the smallest budget that makes
    no more of them: chunks of about equal size."""
    if not rows:
        return []
    added = _branch_lengths(rows, start)

    def cut(limit: int) -> list[list[_Row]]:
        chunks: list[list[_Row]] = []
        size = keys = 0
        for row, more in zip(rows, added, strict=True):
            fits = chunks and chunks[-1][-1].adapter == row.adapter and size + more <= limit
            length = len(row.tokens) - start
            if size >= enough and length - more <= _LITTLE * size:
                fits = False
            # Attention gathers the keys of each row's whole path, shared tokens too.
            keys += len(row.tokens)
            if fits and keys <= _KEYS_PER_TOKEN * budget:
                chunks[-1].append(row)
                size += more
            else:
                # A new micro-batch has to compute the shared prefix again.
                chunks.append([row])
                size, keys = length, len(row.tokens)
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


def _micro_batch(source: Sequence[TrainingRow], packed: _Chunk, share: bool) -> MicroBatch:
    chunk, start = packed.rows, packed.start
    if share:
        tokens, places, trie = pack_trie([row.tokens[start:] for row in chunk], start)
        input_ids = [tokens]
    else:
        width = max(len(row.tokens) for row in chunk)
        input_ids = [row.tokens + [0] * (width - len(row.tokens)) for row in chunk]
        places = [range(row * width, (row + 1) * width) for row in range(len(chunk))]
        trie = None
    # ``places[b][t - start]``: the place of token t of row b in the flat ``input_ids``.
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
        places=torch.tensor([places[row][at - 1 - start] for row, at in trained]),
        rows=torch.tensor([row for row, _ in trained]),
        columns=torch.tensor([at - 1 for _, at in trained]),
        targets=torch.tensor([own[row].tokens[at] for row, at in trained]),
        logprobs=floats([row.logprobs for row in own]),
        advantages=floats([row.advantages for row in own]),
        temperatures=temperatures,
        stem=packed.stem,
    )
