"""What a gateway remembers of each attempt while it runs: order, conversations, answers.

Knows attempts by id. Does not know HTTP, tokens or how an answer is made. Everything here is in
memory and may be lost: after a restart numbering goes on from the store, prompts are rendered
plainly and a retry samples again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from agentrl_proxy.continuity import Conversations

MAX_ATTEMPTS = 10_000
IDLE_S = 3600.0
MAX_ANSWERS = 64  # per attempt, kept for client retries


@dataclass(slots=True)
class Answer:
    """One request of an attempt, being answered or answered."""

    done: asyncio.Future[dict[str, Any]]
    waiting: int = 0  # retries that wait for it: it must then outlive its own client


@dataclass(slots=True)
class Attempt:
    """The memory of one attempt."""

    next_seq: int | None = None
    in_flight: int = 0
    used_at: float = 0.0
    conversations: Conversations = field(default_factory=Conversations)
    answers: OrderedDict[bytes, Answer] = field(default_factory=OrderedDict[bytes, Answer])

    async def take_seq(self, first: Callable[[], Awaitable[int]]) -> int:
        """The next number in the order of acceptance; ``first`` asks the store where to begin."""
        if self.next_seq is None:
            begin = await first()
            if self.next_seq is None:  # nobody else asked meanwhile
                self.next_seq = begin
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    def earlier(self, body: bytes) -> Answer | None:
        """The latest answer to this same body that has not failed."""
        return self.answers.get(_key(body))

    def begin(self, body: bytes) -> Answer:
        answer = Answer(asyncio.get_running_loop().create_future())
        key = _key(body)
        self.answers[key] = answer
        self.answers.move_to_end(key)
        if len(self.answers) > MAX_ANSWERS:
            self.answers.popitem(last=False)
        return answer

    def abandon(self, body: bytes, answer: Answer) -> None:
        """It failed or was cancelled: a retry samples again."""
        key = _key(body)
        if self.answers.get(key) is answer:
            del self.answers[key]


class Attempts:
    """Attempts seen lately, least recently used first. Bounded, and idle ones are dropped."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Attempt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, attempt_id: str) -> Attempt:
        attempt = self._by_id.get(attempt_id)
        now = time.monotonic()
        if attempt is None:
            attempt = self._by_id[attempt_id] = Attempt()
            self._sweep(now)
        attempt.used_at = now
        self._by_id.move_to_end(attempt_id)
        return attempt

    def forget(self, attempt_id: str) -> None:
        self._by_id.pop(attempt_id, None)

    def quiet(self, seconds: float) -> list[str]:
        """Attempts that asked nothing for this long: some of them will be over."""
        before = time.monotonic() - seconds
        return [i for i, a in self._by_id.items() if a.used_at < before and not a.in_flight]

    def _sweep(self, now: float) -> None:
        while len(self._by_id) > 1:
            attempt_id, oldest = next(iter(self._by_id.items()))
            expired = len(self._by_id) > MAX_ATTEMPTS or now - oldest.used_at > IDLE_S
            if not expired or oldest.in_flight:
                return
            del self._by_id[attempt_id]


def _key(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
