"""Key/value storage: rows of running sequences, and one pool that they and cached prefixes share.

Knows tensors and transformers' ``Cache`` interface, not requests, sampling or LoRA.

A ``KVRows`` is one rectangle ``[layers, rows, kv_heads, time, head_dim]``. Rows in use always come
first (removing a row moves the last one into the hole), so a decode step attends over a *view* and
copies nothing: on a CPU, gathering scattered rows costs as much as the attention itself.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentrl_trainer.models.devices import free_memory
from agentrl_trainer.models.loading import BaseModel

log = logging.getLogger(__name__)

MIN_ROWS = 4
MIN_TIME = 64
TIME_STEP = 16
"""GPU attention kernels want the view's length rounded to this."""
KEEP_EMPTY = 4096
"""An empty rectangle of up to this many tokens is kept for the next sequence."""
MIN_PREFIX = 8
"""Sharing fewer tokens than this is not worth a copy."""
MOST_PREFIXES = 256
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.6
_CPU_MOST_BYTES = 4 * 2**30


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


def default_budget(base: BaseModel, bytes_per_token: int) -> int:
    """Return a share of the free memory in tokens, at least one full context."""
    free = free_memory(base.device)
    if base.device.type == "cuda":
        most = free * _CUDA_SHARE
    else:  # a Mac's GPU has no memory of its own either
        most = min(free * _CPU_SHARE, _CPU_MOST_BYTES)
    return max(int(most // bytes_per_token), base.context_length)


class Stored(Protocol):
    """What the model computed for a run of tokens."""

    overhead: ClassVar[int] = 0
    """Tokens that it is charged in the pool besides its own."""

    def copied(self) -> Stored: ...


@dataclass(slots=True)
class KV(Stored):
    """Keys and values of a run of tokens: two tensors ``[layers, heads, tokens, dim]``."""

    keys: Tensor
    values: Tensor

    def copied(self) -> KV:
        return KV(self.keys.clone(), self.values.clone())


@dataclass(slots=True, eq=False)
class Prefix:
    """What was computed for the tokens of a finished sequence."""

    owner: object
    """The adapter version that computed it; no other version may use it."""
    tokens: list[int]
    kv: Stored

    @property
    def held(self) -> int:
        return len(self.tokens)

    @property
    def cost(self) -> int:
        return self.held + self.kv.overhead


class KVPool:
    """Counts allocated key/value tokens, and keeps prefixes of finished sequences.

    Prefixes give way when tokens run out, least recently used first.
    """

    def __init__(self, tokens: int) -> None:
        self.limit = tokens
        self.used = 0
        self._entries: dict[Prefix, None] = {}

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit, after evicting as many prefixes as necessary."""
        while self.used + tokens > self.limit:
            if not self._entries:
                return False
            self._drop(next(iter(self._entries)))
        return True

    def prefixes(self, owner: object) -> list[Prefix]:
        return [e for e in self._entries if e.owner is owner]

    def keep(self, owner: object, tokens: list[int], kv: Stored) -> None:
        """Copy what was computed for ``tokens``, unless they are few or stored already."""
        size, known = len(tokens), self.prefixes(owner)
        if size < MIN_PREFIX or any(
            len(e.tokens) >= size and e.tokens[size - 1] == tokens[-1] and e.tokens[:size] == tokens
            for e in known
        ):
            return
        try:
            kv = kv.copied()
        except (RuntimeError, MemoryError):  # a prefix is optional
            log.warning("no memory to keep a prefix of %d tokens", size)
            return
        # A conversation's next turn contains the previous one: keep only the longer.
        for entry in known:
            if tokens[: len(entry.tokens)] == entry.tokens:
                self._drop(entry)
        while len(self._entries) >= MOST_PREFIXES:
            self._drop(next(iter(self._entries)))
        entry = Prefix(owner, tokens, kv)
        if self.fits(entry.cost):
            self._entries[entry] = None
            self.used += entry.cost

    def touch(self, entry: Prefix) -> None:
        """Mark an entry as the most recently used one."""
        self._entries[entry] = self._entries.pop(entry)

    def drop_owner(self, owner: object) -> None:
        for entry in self.prefixes(owner):
            self._drop(entry)

    def _drop(self, entry: Prefix) -> None:
        del self._entries[entry]
        self.used -= entry.cost


class Rows(ABC):
    """A rectangle of ``rows`` by ``time`` tokens, charged to the pool."""

    parts = True
    """Whether another row may copy a prefix of what a row holds, rather than all of it."""

    def __init__(self, pool: KVPool) -> None:
        self.rows = self.time = 0
        self.owners: list[Any] = []
        """Of the rows in use, which come first; an owner's ``held`` tokens are in its row."""
        self._pool = pool

    @abstractmethod
    def _reallocate(self, rows: int, time: int) -> None:
        """Keep the content of the rows in use."""

    @abstractmethod
    def peek(self, row: int, length: int) -> Stored:
        """Return a view of a row's first ``length`` tokens, valid until the next change."""

    @abstractmethod
    def load(self, row: int, source: Stored, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` into a row."""

    @abstractmethod
    def scrub(self, row: int) -> None:
        """Overwrite a row that may hold NaN."""

    def reserve(self, rows: int, time: int, *, force: bool = False) -> bool:
        """Make room for ``rows`` rows of ``time`` tokens; False if the pool forbids it.

        Grows by doubling while the pool allows it, else to exactly what is needed. ``force``
        exceeds the limit, so that a lone sequence can go on.
        """
        if rows <= self.rows and time <= self.time:
            return True
        time = -(-time // TIME_STEP) * TIME_STEP
        held = self.rows * self.time
        doubled = (_grown(rows, self.rows, MIN_ROWS), _grown(time, self.time, MIN_TIME))
        if self._pool.used + math.prod(doubled) - held <= self._pool.limit:
            self._resize(*doubled)
            return True
        # Callers say what *all* rows need, so this may shrink a rectangle that was longer.
        rows = max(rows, len(self.owners))
        if not self._pool.fits(rows * time - held) and not force:
            return False
        self._resize(rows, time)
        return True

    def append(self, owner: Any) -> int:
        """Give the next free row to ``owner``; ``reserve`` it first."""
        assert len(self.owners) < self.rows
        self.owners.append(owner)
        return len(self.owners) - 1

    def remove(self, row: int) -> None:
        """Free a row; the last row moves into its place."""
        if (last := len(self.owners) - 1) != row:
            self.move(last, row)
        self.owners.pop()
        if not self.owners and self.rows * self.time > min(KEEP_EMPTY, self._pool.limit // 16):
            self._resize(0, 0)

    def move(self, row: int, to: int) -> None:
        """Copy a row over another one."""
        owner = self.owners[to] = self.owners[row]
        self.load(to, self.peek(row, owner.held), owner.held)

    def free(self) -> None:
        self.owners.clear()
        self._resize(0, 0)

    def _resize(self, rows: int, time: int) -> None:
        self._reallocate(rows, time)
        self._pool.used += rows * time - self.rows * self.time
        self.rows, self.time = rows, time


class KVRows(Rows, Cache):
    """Keys and values as transformers' ``Cache``: the model writes into the rows and reads them."""

    def __init__(self, shape: KVShape, pool: KVPool) -> None:
        Rows.__init__(self, pool)
        Cache.__init__(self, layers=[])
        self.shape = shape
        self._keys, self._values = self._empty(0, 0)
        # Set by begin(): where new tokens go, and how much of the rows is attended to.
        self._targets = (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
        self.view = 0

    def __len__(self) -> int:
        return self.shape.layers

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **more: object,
    ) -> tuple[Tensor, Tensor]:
        """``[batch, heads, new, dim]`` in; views ``[batch, heads, view, dim]`` out."""
        return self.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))

    # The forward passes a 4D mask and positions, so most models never call these.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.view, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def begin(self, positions: Tensor, view: int) -> None:
        """Prepare a forward of new tokens at ``positions`` ``[batch, new]`` of the first rows."""
        self._targets = (torch.arange(len(positions), device=positions.device)[:, None], positions)
        self.view = view

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
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

    def scrub(self, row: int) -> None:
        # Attention multiplies masked slots by 0, and 0 * NaN is NaN.
        self._keys[:, row].zero_()
        self._values[:, row].zero_()

    def _reallocate(self, rows: int, time: int) -> None:
        old = self._keys, self._values
        self._keys, self._values = self._empty(rows, time)
        kept_rows, kept_time = len(self.owners), min(self.time, time)
        for new, was in zip((self._keys, self._values), old, strict=True):
            new[:, :kept_rows, :, :kept_time] = was[:, :kept_rows, :, :kept_time]

    def _empty(self, rows: int, time: int) -> tuple[Tensor, Tensor]:
        s = self.shape
        size = (s.layers, rows, s.heads, time)
        return _zeros((*size, s.key_dim), s), _zeros((*size, s.value_dim), s)


def _zeros(size: tuple[int, ...], shape: KVShape) -> Tensor:
    """Allocate zeros: masked slots enter the attention with weight 0 and must be finite."""
    if shape.device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # numpy's zeros are lazy: pages never written to take neither time nor memory.
    data = np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(shape.dtype).view(size)


def _grown(want: int, have: int, least: int) -> int:
    return have if want <= have else max(want, 2 * have, least)
