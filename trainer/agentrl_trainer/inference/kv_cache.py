"""Key/value storage: rows of running sequences, and one pool that they and cached prefixes share.

Knows tensors and transformers' ``Cache`` interface, not requests, sampling or LoRA.

A ``KVRows`` is one rectangle ``[layers, rows, kv_heads, time, head_dim]``. Rows in use always come
first (removing a row moves the last one into the hole), so a decode step attends over a *view* and
copies nothing: on a CPU, gathering scattered rows costs as much as the attention itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentrl_trainer.models.devices import free_memory
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.prefix_attention import longer_prefix

log = logging.getLogger(__name__)

MIN_ROWS = 4
MIN_TIME = 64
TIME_STEP = 16
"""GPU attention kernels want the view's length rounded to this."""
KEEP_EMPTY = 4096
"""An empty rectangle of up to this many tokens is kept for the next sequence."""
MIN_PREFIX = 8
"""Sharing fewer tokens than this is not worth a copy."""
MOST_PREFIXES = 1024
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
    start: int = 0
    """The place of the tensors' first token in the run."""
    before: KV | None = None
    """What holds the tokens before ``start``; it may hold more."""

    def copied(self) -> KV:
        return self.copied_after(None, 0)

    def copied_after(self, before: KV | None, start: int) -> KV:
        """Copy a run, but for its first ``start`` tokens, which ``before`` holds."""
        keys, values = self.keys[:, :, start:].clone(), self.values[:, :, start:].clone()
        return KV(keys, values, start, before)


@dataclass(slots=True, eq=False)
class Prefix:
    """What was computed for the tokens of a finished sequence."""

    owner: object
    """The adapter version that computed it; no other version may use it."""
    tokens: list[int]
    kv: Stored
    parent: Prefix | None = None
    """Holds the first ``shared`` tokens."""
    shared: int = 0

    @property
    def held(self) -> int:
        return len(self.tokens)

    @property
    def cost(self) -> int:
        return self.held - self.shared + self.kv.overhead


class KVPool:
    """Counts allocated key/value tokens, and keeps prefixes of finished sequences.

    Prefixes give way when tokens run out, least recently used first. They form trees: what a
    sequence shares with another one, as siblings their prompt, is kept once. A parent counts as
    used after its children, so it goes after them.
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
        parent, shared = self._longest_prefix(owner, tokens)
        if len(tokens) < MIN_PREFIX or shared == len(tokens):
            return
        before = parent and parent.kv
        if parent is not None and shared == parent.held and not isinstance(before, KV):
            self._drop(parent)  # of a conversation's turns, the last holds the others
        try:
            if isinstance(kv, KV) and isinstance(before, KV) and shared >= MIN_PREFIX:
                kv = kv.copied_after(before, shared)
            else:
                kv, parent, shared = kv.copied(), None, 0
        except (RuntimeError, MemoryError):  # a prefix is optional
            log.warning("no memory to keep a prefix of %d tokens", len(tokens))
            return
        if parent is not None:
            self.touch(parent)
        while len(self._entries) >= MOST_PREFIXES:
            self._drop(next(iter(self._entries)))
        entry = Prefix(owner, tokens, kv, parent, shared)
        if self.fits(entry.cost) and (parent is None or parent in self._entries):
            self.used += entry.cost
            self.touch(entry)

    def _longest_prefix(self, owner: object, tokens: list[int]) -> tuple[Prefix | None, int]:
        found, shared = None, 0
        for entry in self.prefixes(owner):
            if longer := longer_prefix(entry.tokens, tokens, shared):
                found, shared = entry, longer
        while found is not None and found.shared >= shared:
            found = found.parent  # which holds all of them
        return found, shared

    def touch(self, entry: Prefix) -> None:
        """Mark an entry as the most recently used one, but for those that it depends on."""
        last: Prefix | None = entry
        while last is not None:
            self._entries.pop(last, None)
            self._entries[last] = None
            last = last.parent

    def drop_owner(self, owner: object) -> None:
        for entry in self.prefixes(owner):
            self._drop(entry)

    def drop_all(self) -> None:
        while self._entries:
            self._drop(next(iter(self._entries)))

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


class KVRows(Rows, Cache):
    """Keys and values as transformers' ``Cache``: the model writes into the rows and reads them."""

    def __init__(self, shape: KVShape, pool: KVPool) -> None:
        Rows.__init__(self, pool)
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
        rows = torch.arange(len(positions), device=positions.device)[:, None, None]
        heads = torch.arange(self.shape.heads, device=positions.device)
        places = (rows * self.shape.heads + heads) * self._keys.shape[3] + positions[..., None]
        self._places, self.view = places.flatten(), view

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, new, heads, dim]`` in, views ``[batch, heads, view, dim]`` out."""
        stored_k, stored_v = self._keys[layer], self._values[layer]
        for stored, new in (stored_k, keys), (stored_v, values):
            width = new.shape[-1]
            stored.view(-1, width).index_copy_(0, self._places, new.reshape(-1, width))
        batch = len(keys)
        return stored_k[:batch, :, : self.view], stored_v[:batch, :, : self.view]

    def load(self, row: int, source: Stored, length: int) -> None:
        assert isinstance(source, KV)
        part: KV | None = source
        while part is not None:
            if (start := part.start) < length:
                own = slice(length - start)
                self._keys[:, row, :, start:length] = part.keys[:, :, own]
                self._values[:, row, :, start:length] = part.values[:, :, own]
                length = start
            part = part.before

    def peek(self, row: int, length: int) -> KV:
        return KV(self._keys[:, row, :, :length], self._values[:, row, :, :length])

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
            held = slice(owner.held)
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
