"""What was computed for runs of tokens, and the pool that they and running sequences share.

Knows tensors and token lists, not rows, requests, sampling or LoRA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from agentrl_trainer.models.prefix_attention import common_prefix, longer_prefix

log = logging.getLogger(__name__)

MIN_PREFIX = 8
"""Sharing fewer tokens than this is not worth a copy."""
MOST_PREFIXES = 1024


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

    @property
    def end(self) -> int:
        return self.start + self.keys.shape[2]

    def parts(self, first: int, end: int) -> Iterator[tuple[KV, int, int]]:
        """Yield what holds the tokens from ``first`` to ``end``, and which of them, last first."""
        part: KV | None = self
        while part is not None and first < end:
            if (start := max(part.start, first)) < end:
                yield part, start, end
                end = start
            part = part.before

    def copy_to(self, keys: Tensor, values: Tensor, first: int, end: int) -> None:
        """Copy the tokens from ``first`` to ``end`` to the begin of two tensors."""
        for part, a, b in self.parts(first, end):
            to, own = slice(a - first, b - first), slice(a - part.start, b - part.start)
            keys[:, :, to] = part.keys[:, :, own]
            values[:, :, to] = part.values[:, :, own]

    def copied(self) -> KV:
        return self.copied_after(None, 0, self.end)

    def copied_after(self, before: KV | None, start: int, end: int) -> KV:
        """Copy the run's tokens up to ``end`` from ``start`` on; ``before`` holds the others."""
        like = self.keys, self.values
        keys, values = (x.new_empty(*x.shape[:2], end - start, x.shape[3]) for x in like)
        self.copy_to(keys, values, start, end)
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
    in_use: Callable[[], bool] = lambda: False
    """Whether it is the stem of running sequences, so that it must stay."""

    @property
    def held(self) -> int:
        return len(self.tokens)

    @property
    def cost(self) -> int:
        return self.held - self.shared + self.kv.overhead


class KVPool:
    """Counts allocated key/value tokens, and keeps prefixes of finished sequences.

    Prefixes give way when tokens run out, least recently used first, but for stems of running
    sequences. They form trees: what a sequence shares with another one, as siblings their prompt,
    is kept once. A parent counts as used after its children, so it goes after them.
    """

    def __init__(self, tokens: int) -> None:
        self.limit = tokens
        self.used = 0
        self._entries: dict[Prefix, None] = {}

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit, after evicting as many prefixes as necessary."""
        while self.used + tokens > self.limit:
            if not self._drop_oldest():
                return False
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
                kv = kv.copied_after(before, shared, len(tokens))
            else:
                kv, parent, shared = kv.copied(), None, 0
        except (RuntimeError, MemoryError):  # a prefix is optional
            log.warning("no memory to keep a prefix of %d tokens", len(tokens))
            return
        if parent is not None:
            self.touch(parent)
        while len(self._entries) >= MOST_PREFIXES and self._drop_oldest():
            pass
        entry = Prefix(owner, tokens, kv, parent, shared)
        if self.fits(entry.cost) and (parent is None or parent in self._entries):
            self.used += entry.cost
            self.touch(entry)

    def keep_whole(self, owner: object, tokens: list[int], kv: KV) -> Prefix | None:
        """Return what holds ``tokens`` in one piece, copied from ``kv`` if nothing does."""
        for entry in self.prefixes(owner):
            whole = isinstance(entry.kv, KV) and not entry.kv.start
            if whole and common_prefix(entry.tokens, tokens) == len(tokens):
                self.touch(entry)
                return entry
        if not self.fits(len(tokens)):
            return None
        try:
            entry = Prefix(owner, tokens, kv.copied_after(None, 0, len(tokens)))
        except (RuntimeError, MemoryError):  # a stem is optional
            return None
        self.used += entry.cost
        self.touch(entry)
        return entry

    def __contains__(self, entry: Prefix | None) -> bool:
        return entry in self._entries

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
            if not entry.in_use():
                self._drop(entry)

    def drop_all(self) -> None:
        while self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        oldest = next((entry for entry in self._entries if not entry.in_use()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, entry: Prefix) -> None:
        del self._entries[entry]
        entry.in_use = lambda: False  # the old one refers to it: a cycle, freed only by gc
        self.used -= entry.cost
