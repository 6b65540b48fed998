"""Hold what the gateway remembers of each attempt: order of calls, conversations, requests.

All of it is in memory and may be lost. After a restart, numbering continues from the store, client
retries are answered from it (client_retries.py), and prompts are rendered anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.rendering.continuity import Conversations

MAX_ATTEMPTS = 10_000
IDLE_S = 3600.0
QUIET_S = 5.0  # first check whether a quiet attempt is over; each later check waits twice as long


@dataclass(slots=True)
class Spent:
    """What an attempt has used of its budget."""

    calls: int
    tokens: int


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that is being answered.

    ``answer`` resolves to its chat completion once that is durable, or to None if it failed.
    """

    key: bytes
    memory: AttemptMemory | None  # None: outside any attempt
    answer: asyncio.Future[dict[str, Any] | None]
    waiting: int = 0
    """Client retries that wait for the answer. While there are any, the request outlives its own
    client."""


@dataclass(slots=True)
class IdenticalRequests:
    """What became of one attempt's identical requests, for the client retries among them."""

    running: list[RunningRequest] = field(default_factory=list[RunningRequest])
    failed: list[float] = field(default_factory=list[float])
    """When each failed (``time.monotonic``). The next retry takes its place."""
    unheard: list[str] = field(default_factory=list[str])
    """Response ids that an earlier gateway process answered and no agent continued, newest last.
    Each goes to one retry."""
    recalled: bool = False  # the store was asked for requests of earlier processes


@dataclass(slots=True)
class AttemptMemory:
    """The memory of one attempt."""

    next_seq: int | None = None
    first_seq: int | None = None  # of this process; only the store knows the calls before it
    in_flight: int = 0
    used_at: float = 0.0
    patience: float = QUIET_S
    spent: Spent | None = None  # None: not read from the store yet
    conversations: Conversations = field(default_factory=Conversations)
    requests: OrderedDict[bytes, IdenticalRequests] = field(
        default_factory=OrderedDict[bytes, IdenticalRequests]
    )

    async def take_seq(self, first: Callable[[], Awaitable[int]]) -> int:
        """Return the next number in the order of acceptance; ``first`` reads the initial one."""
        if self.next_seq is None:
            begin = await first()
            if self.next_seq is None:  # no other request read it meanwhile
                self.next_seq = self.first_seq = begin
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq


class AttemptMemories:
    """Recent attempts, least recently used first. Bounded; idle ones are dropped."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, AttemptMemory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, attempt_id: str) -> AttemptMemory:
        attempt = self._by_id.get(attempt_id)
        now = time.monotonic()
        if attempt is None:
            attempt = self._by_id[attempt_id] = AttemptMemory()
            self._sweep(now)
        attempt.used_at = now
        attempt.patience = QUIET_S
        self._by_id.move_to_end(attempt_id)
        return attempt

    def forget(self, attempt_id: str) -> None:
        self._by_id.pop(attempt_id, None)

    def quiet(self) -> list[str]:
        """Return attempts without a recent request: some of them may be over.

        An attempt that stays is returned again after twice the time.
        """
        now = time.monotonic()
        found: list[str] = []
        for attempt_id, attempt in self._by_id.items():
            if attempt.used_at + attempt.patience < now and not attempt.in_flight:
                attempt.patience = 2 * (now - attempt.used_at)
                found.append(attempt_id)
        return found

    def _sweep(self, now: float) -> None:
        while len(self._by_id) > 1:
            attempt_id, oldest = next(iter(self._by_id.items()))
            expired = len(self._by_id) > MAX_ATTEMPTS or now - oldest.used_at > IDLE_S
            if not expired or oldest.in_flight:
                return
            del self._by_id[attempt_id]
