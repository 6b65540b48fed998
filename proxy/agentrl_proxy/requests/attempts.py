"""What a gateway remembers of each attempt while it runs: order, conversations, requests.

Knows attempts by id. Does not know HTTP, tokens or how an answer is made. Everything here is in
memory and may be lost: after a restart numbering goes on from the store, answers are recalled from
it for the retries that ask for them (retries.py), and prompts are rendered plainly.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentrl_proxy.rendering.continuity import Conversations
from agentrl_proxy.requests.idempotency import Requests

MAX_ATTEMPTS = 10_000
IDLE_S = 3600.0
QUIET_S = 5.0  # after which an attempt may be over; then twice as long, and so on


@dataclass(slots=True)
class Spent:
    """What an attempt has used of its budget."""

    calls: int
    tokens: int


@dataclass(slots=True)
class AttemptMemory:
    """The memory of one attempt."""

    next_seq: int | None = None
    first_seq: int | None = None  # where it began: what was accepted before, only the store knows
    in_flight: int = 0
    used_at: float = 0.0
    patience: float = QUIET_S  # how long it has to be quiet to be looked at
    spent: Spent | None = None  # None: not asked the store yet
    conversations: Conversations = field(default_factory=Conversations)
    requests: Requests = field(default_factory=Requests)

    async def take_seq(self, first: Callable[[], Awaitable[int]]) -> int:
        """The next number in the order of acceptance; ``first`` asks the store where to begin."""
        if self.next_seq is None:
            begin = await first()
            if self.next_seq is None:  # nobody else asked meanwhile
                self.next_seq = self.first_seq = begin
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq


class AttemptMemories:
    """Attempts seen lately, least recently used first. Bounded, and idle ones are dropped."""

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
        """Attempts that asked nothing for a while: some of them will be over.

        One that is not is named again when it has been quiet for twice as long.
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
