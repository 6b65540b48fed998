"""Key/value storage: rows for the sequences being computed, and a prefix cache beside them.

Knows: tensors and the transformers ``Cache`` interface. Does not know: requests, sampling, LoRA.

A ``RowCache`` is one rectangle ``[layers, rows, kv_heads, time, head_dim]``. Rows in use are always
the first ones (removing a row moves the last one into the hole), so a decode step attends over a
*view* and copies nothing: on a CPU, gathering scattered rows costs as much as the attention itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_ROWS = 4
MIN_TIME = 64
# Storage is kept finite and the view's length rounded to this: GPU attention kernels want it.
TIME_STEP = 16
# An empty rectangle of up to so many tokens is kept for the next sequence.
KEEP_EMPTY = 4096
# Sharing fewer tokens than this is not worth a copy, let alone a wait.
MIN_PREFIX = 8


@dataclass(frozen=True, slots=True)
class KVShape:
    """Per token and layer: keys are ``[heads, key_dim]``, values ``[heads, value_dim]``."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class Stored(Protocol):
    """What was computed of a run of tokens."""

    def __len__(self) -> int: ...

    @property
    def cost(self) -> int:
        """What it is reckoned at in the budget, in tokens."""
        return len(self)

    def usable(self, length: int) -> int:
        """How many of the first ``length`` tokens another row may take over."""
        ...


@dataclass(slots=True)
class KV(Stored):
    """Keys and values of a run of tokens: two tensors ``[layers, heads, tokens, dim]``."""

    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[2]

    def usable(self, length: int) -> int:
        return length


class Budget:
    """Counts allocated key/value tokens, and frees the prefix cache when they run out."""

    def __init__(self, tokens: int) -> None:
        self.limit = tokens
        self.used = 0
        self.evict: Callable[[], bool] = lambda: False
        """Drops the least recently used prefix; False when there is none."""

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` more can be had, evicting prefixes if that is what it takes."""
        while self.used + tokens > self.limit:
            if not self.evict():
                return False
        return True


class _RowLayer(CacheLayerMixin):
    """One layer of a RowCache: writes the new tokens where the current step says."""

    def __init__(self, rows: RowCache, index: int) -> None:
        super().__init__()
        self._rows = rows
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, heads, new, dim]`` in; views ``[batch, heads, view, dim]`` out."""
        return self._rows.write(
            self._index, key_states.transpose(1, 2), value_states.transpose(1, 2)
        )

    # The engine passes a ready 4D mask and positions, so the model never needs these; they say the
    # truth for a model that asks anyway.
    def get_seq_length(self) -> int:
        return self._rows.view

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.view, 0

    def get_max_length(self) -> int:
        return -1


class Rows(ABC):
    """A rectangle of ``rows`` by ``time`` tokens, counted against the budget."""

    parts = True
    """Whether a part of what a row holds, from its first token on, is of use to another one."""

    def __init__(self, budget: Budget) -> None:
        self.count = 0
        """Rows in use: 0 to count - 1."""
        self._budget = budget

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def time(self) -> int: ...

    def reserve(self, rows: int, time: int, *, force: bool = False) -> bool:
        """Make room for ``rows`` rows of ``time`` tokens; False if the budget forbids it.

        Grows by doubling while the budget allows, else to just what is asked for.
        ``force`` allocates beyond the budget: a lone sequence must be able to go on.
        """
        if rows <= self.rows and time <= self.time:
            return True
        time = -(-time // TIME_STEP) * TIME_STEP
        held = self.rows * self.time
        for want_rows, want_time in (
            (_grown(rows, self.rows, MIN_ROWS), _grown(time, self.time, MIN_TIME)),
            # Callers say what *all* rows need, so this may shrink a rectangle that was once longer.
            (max(rows, self.count), time),
        ):
            extra = want_rows * want_time - held
            if self._budget.used + extra <= self._budget.limit:
                break
        else:
            if not self._budget.fits(extra) and not force:
                return False
        self._resize(want_rows, want_time)
        return True

    def append(self) -> int:
        """Take the next free row (reserve() it first)."""
        assert self.count < self.rows
        self.count += 1
        return self.count - 1

    def remove(self, row: int, last_length: int) -> None:
        """Give back a row; the last row, holding ``last_length`` tokens, moves into its place."""
        if row != self.count - 1:
            self.move(self.count - 1, row, last_length)
        self.count -= 1
        if not self.count and self.rows * self.time > min(KEEP_EMPTY, self._budget.limit // 16):
            self._resize(0, 0)

    def move(self, row: int, to: int, length: int) -> None:
        """Copy the ``length`` tokens of a row over another one."""
        self.load(to, self.peek(row, length), length)

    @abstractmethod
    def export(self, row: int, length: int) -> Stored:
        """A copy of the first ``length`` tokens of a row."""

    def free(self) -> None:
        self.count = 0
        self._resize(0, 0)

    @abstractmethod
    def load(self, row: int, source: Stored, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` into a row."""

    @abstractmethod
    def peek(self, row: int, length: int) -> Stored:
        """A view of the first ``length`` tokens of a row: valid until the next change."""

    @abstractmethod
    def scrub(self, row: int) -> None:
        """Forget a row that may hold NaN."""

    @abstractmethod
    def _resize(self, rows: int, time: int) -> None: ...


class RowCache(Rows, Cache):
    """Keys and values as transformers' ``Cache``: the model writes into the rows and reads them."""

    def __init__(self, shape: KVShape, budget: Budget) -> None:
        Rows.__init__(self, budget)
        Cache.__init__(self, layers=[_RowLayer(self, i) for i in range(shape.layers)])
        self.shape = shape
        self._keys, self._values = self._empty(0, 0)
        # Set by begin(): where new tokens go, and how much of the rows is attended to.
        self._targets = (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
        self.view = 0

    @property
    def rows(self) -> int:
        return self._keys.shape[1]

    @property
    def time(self) -> int:
        return self._keys.shape[3]

    def begin(self, positions: torch.Tensor, view: int) -> None:
        """Prepare a forward of new tokens at ``positions`` ``[batch, new]`` of the first rows."""
        self._targets = (torch.arange(len(positions), device=positions.device)[:, None], positions)
        self.view = view

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, new, heads, dim]`` in, views ``[batch, heads, view, dim]`` out."""
        stored_k, stored_v = self._keys[layer], self._values[layer]
        stored_k.transpose(1, 2).index_put_(self._targets, keys)
        stored_v.transpose(1, 2).index_put_(self._targets, values)
        batch = len(keys)
        return stored_k[:batch, :, : self.view], stored_v[:batch, :, : self.view]

    def load(self, row: int, source: Stored, length: int) -> None:
        assert isinstance(source, KV)
        self._keys[:, row, :, :length] = source.keys[:, :, :length]
        self._values[:, row, :, :length] = source.values[:, :, :length]

    def peek(self, row: int, length: int) -> KV:
        return KV(self._keys[:, row, :, :length], self._values[:, row, :, :length])

    def export(self, row: int, length: int) -> KV:
        view = self.peek(row, length)
        return KV(view.keys.clone(), view.values.clone())

    def scrub(self, row: int) -> None:
        # Masked slots are multiplied by 0, and 0 * NaN is NaN.
        self._keys[:, row].zero_()
        self._values[:, row].zero_()

    def _resize(self, rows: int, time: int) -> None:
        keys, values = self._empty(rows, time)
        kept_rows, kept_time = min(self.count, rows), min(self.time, time)
        keys[:, :kept_rows, :, :kept_time] = self._keys[:, :kept_rows, :, :kept_time]
        values[:, :kept_rows, :, :kept_time] = self._values[:, :kept_rows, :, :kept_time]
        self._budget.used += rows * time - self.rows * self.time
        self._keys, self._values = keys, values

    def _empty(self, rows: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        size = (s.layers, rows, s.heads, time)
        return _zeros((*size, s.key_dim), s), _zeros((*size, s.value_dim), s)


def _zeros(size: tuple[int, ...], shape: KVShape) -> torch.Tensor:
    """Not empty: masked slots take part in the product with weight 0 and must be finite."""
    if shape.device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # numpy asks the system for zeros: pages that are never written to take neither time nor memory.
    data = np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(shape.dtype).view(size)


def _grown(want: int, have: int, least: int) -> int:
    return have if want <= have else max(want, 2 * have, least)


@dataclass(slots=True, eq=False)
class Prefix:
    """Keys and values of the tokens of a finished sequence."""

    owner: object
    """The adapter version which computed them: no other may use them."""
    tokens: list[int]
    kv: Stored


class PrefixStore:
    """Keys and values of finished sequences, least recently used first."""

    def __init__(self, budget: Budget, most: int) -> None:
        self._budget = budget
        self._most = most
        self._entries: dict[Prefix, None] = {}
        budget.evict = self.evict_oldest

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, owner: object) -> list[Prefix]:
        return [e for e in self._entries if e.owner is owner]

    def wants(self, owner: object, tokens: list[int]) -> bool:
        """Whether these tokens are worth storing: long enough, and not stored already."""
        size = len(tokens)
        return size >= MIN_PREFIX and not any(
            len(e.tokens) >= size and e.tokens[size - 1] == tokens[-1] and e.tokens[:size] == tokens
            for e in self.of(owner)
        )

    def add(self, owner: object, tokens: list[int], kv: Stored) -> None:
        # A conversation's next turn contains the one before: keep only the longer.
        for entry in self.of(owner):
            size = len(entry.tokens)
            if size <= len(tokens) and tokens[:size] == entry.tokens:
                self._drop(entry)
        while len(self._entries) >= self._most:
            self.evict_oldest()
        if self._budget.fits(kv.cost):
            self._entries[Prefix(owner, tokens, kv)] = None
            self._budget.used += kv.cost

    def touch(self, entry: Prefix) -> None:
        if entry in self._entries:
            self._entries[entry] = self._entries.pop(entry)

    def evict_oldest(self) -> bool:
        entry = next(iter(self._entries), None)
        if entry is None:
            return False
        self._drop(entry)
        return True

    def drop_owner(self, owner: object) -> None:
        for entry in self.of(owner):
            self._drop(entry)

    def _drop(self, entry: Prefix) -> None:
        del self._entries[entry]
        self._budget.used -= entry.kv.cost
