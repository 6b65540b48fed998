"""Key/value storage of running sequences: rows, charged to the pool that cached prefixes share.

Knows tensors and transformers' ``Cache`` interface, not requests, sampling or LoRA.

A ``KVRows`` is one rectangle ``[layers, rows, kv_heads, time, head_dim]``. Rows in use always come
first (removing a row moves the last one into the hole), so a decode step attends over a *view* and
copies nothing: on a CPU, gathering scattered rows costs as much as the attention itself.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentrl_trainer.inference.prefix_cache import KV, KVPool, Stored
from agentrl_trainer.models.devices import free_memory
from agentrl_trainer.models.loading import BaseModel

MIN_ROWS = 4
MIN_TIME = 64
TIME_STEP = 16
"""GPU attention kernels want the view's length rounded to this."""
KEEP_EMPTY = 512
"""An empty rectangle of up to this many tokens is kept for the next sequence."""
_SPARE = 0.5
"""Share of the pool up to which rectangles grow by doubling."""
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


class Rows(ABC):
    """A rectangle of ``rows`` by ``time`` tokens, charged to the pool.

    Lengths are of whole sequences. Those of all rows may begin with a *stem*, the same tokens,
    whose keys and values are somewhere else; the rectangle holds what follows them.
    """

    parts = True
    """Whether another row may copy a prefix of what a row holds, rather than all of it."""

    def __init__(self, pool: KVPool) -> None:
        self.rows = self.time = 0
        self.owners: list[Any] = []
        """Of the rows in use, which come first; an owner's ``held`` tokens are in its row."""
        self.first = 0
        """Tokens of the stem."""
        self._pool = pool

    @abstractmethod
    def _reallocate(self, rows: int, time: int) -> None:
        """Keep the content of the rows in use."""

    @abstractmethod
    def peek(self, row: int, length: int) -> Stored:
        """View a row's first ``length`` tokens; valid until the next change."""

    @abstractmethod
    def load(self, row: int, source: Stored, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` into a row."""

    @abstractmethod
    def scrub(self, row: int) -> None:
        """Overwrite a row that may hold NaN."""

    def reserve(self, rows: int, time: int, *, force: bool = False) -> bool:
        """Make room for ``rows`` rows of ``time`` tokens; False if the pool forbids it.

        Grows by doubling while much of the pool is free, else to exactly what is needed, because
        prefixes would have to go for the rest. ``force`` exceeds the limit, so that a lone sequence
        can go on.
        """
        time -= self.first
        if rows <= self.rows and time <= self.time:
            return True
        time = -(-time // TIME_STEP) * TIME_STEP
        held = self.rows * self.time
        doubled = (_grown(rows, self.rows, MIN_ROWS), _grown(time, self.time, MIN_TIME))
        if self._pool.used + math.prod(doubled) - held <= self._pool.limit * _SPARE:
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


class Part(NamedTuple):
    """What a forward appends to the first rows of ``rows``: row i holds ``starts[i]`` tokens and
    gets ``chunks[i]``."""

    rows: Rows
    chunks: list[list[int]]
    starts: list[int]
    wanted: list[int] | None = None
    """The rows whose logits are wanted; None: all."""


class KVRows(Rows, Cache):
    """Keys and values as transformers' ``Cache``: the model writes into the rows and reads them."""

    def __init__(
        self, shape: KVShape, pool: KVPool, stem: KV | None = None, first: int = 0
    ) -> None:
        """``stem`` holds the first tokens of all rows in one piece, and may hold more."""
        Rows.__init__(self, pool)
        self.stem, self.first = stem, first
        Cache.__init__(self, layers=[])
        self.shape = shape
        self._keys, self._values = self._empty(0, 0)
        # Set by begin(): where new tokens go in a layer, by head, and how much of a row is read.
        self._places = torch.empty(0, dtype=torch.long)
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
        stored_k, stored_v = self.of_layer(layer_idx)
        for stored, new in (stored_k, key_states), (stored_v, value_states):
            width = new.shape[-1]
            new = new.transpose(1, 2).reshape(-1, width)
            stored.view(-1, width).index_copy_(0, self._places, new)
        batch = len(key_states)
        return stored_k[:batch, :, : self.view], stored_v[:batch, :, : self.view]

    # The forward passes a 4D mask and positions, so most models never call these.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.view, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def begin(self, positions: Tensor, view: int) -> None:
        """Prepare a forward of new tokens at ``positions`` ``[batch, new]``, without a stem."""
        rows = torch.arange(len(positions), device=positions.device)[:, None, None]
        heads = torch.arange(self.shape.heads, device=positions.device)
        places = (rows * self.shape.heads + heads) * self._keys.shape[3] + positions[..., None]
        self._places, self.view = places.flatten(), view

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values ``[rows, heads, time, dim]``, not of the stem."""
        return self._keys[layer], self._values[layer]

    def load(self, row: int, source: Stored, length: int) -> None:
        assert isinstance(source, KV)
        source.copy_to(self._keys[:, row], self._values[:, row], self.first, length)

    def peek(self, row: int, length: int) -> KV:
        own = slice(max(length - self.first, 0))
        return KV(self._keys[:, row, :, own], self._values[:, row, :, own], self.first, self.stem)

    def scrub(self, row: int) -> None:
        # Attention multiplies masked slots by 0, and 0 * NaN is NaN.
        self._keys[:, row].zero_()
        self._values[:, row].zero_()

    def _reallocate(self, rows: int, time: int) -> None:
        keys, values = self._keys, self._values
        _, most_rows, _, longest, _ = keys.shape
        if self.shape.device.type == "cpu" and rows and 2 * time > self.time:
            if rows <= most_rows and time <= longest:
                return
            # More than is charged: memory that is not touched is not taken, and copies take time.
            # But not much more than the budget, which the system might refuse.
            more_rows = _grown(rows, most_rows, 4 * MIN_ROWS, times=4)
            more_time = _grown(time, longest, 4 * MIN_TIME, times=4)
            if more_rows * more_time <= 2 * self._pool.limit:
                rows, time = more_rows, more_time
        self._keys, self._values = self._empty(rows, time)
        for row, owner in enumerate(self.owners):  # what is not held must not take memory
            held = slice(owner.held - self.first)
            self._keys[:, row, :, held] = keys[:, row, :, held]
            self._values[:, row, :, held] = values[:, row, :, held]

    def _empty(self, rows: int, time: int) -> tuple[Tensor, Tensor]:
        s = self.shape
        size = (s.layers, rows, s.heads, time)
        return _zeros((*size, s.key_dim), s), _zeros((*size, s.value_dim), s)


def _zeros(size: tuple[int, ...], shape: KVShape) -> Tensor:
    """Allocate zeros: masked slots enter the attention with weight 0 and must be finite."""
    if shape.device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # Pages that are never written to take neither time nor memory, but for huge ones.
    nothing = mmap.mmap(-1, math.prod(size) * shape.dtype.itemsize, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has none
            nothing.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(nothing, dtype=shape.dtype).view(size)


def _grown(want: int, have: int, least: int, *, times: int = 2) -> int:
    return have if want <= have else max(want, times * have, least)
