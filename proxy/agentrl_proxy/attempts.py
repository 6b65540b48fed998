"""What a gateway remembers of each attempt while it runs: order, conversations, answers.

Knows attempts by id. Does not know HTTP, tokens or how an answer is made. Everything here is in
memory and may be lost: after a restart numbering goes on from the store, answers are recalled from
it for the retries that ask for them (retries.py), and prompts are rendered plainly.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from agentrl_proxy.continuity import Conversations

MAX_ATTEMPTS = 10_000
IDLE_S = 3600.0
MAX_ANSWERS = 64  # different requests per attempt, kept for client retries
MAX_ANSWER_BYTES = 2**20  # of them per attempt: with log-probs one can be tens of MB
MAX_LOOKED_UP = 256  # different requests per attempt
MAX_RECALLED = 16  # identical requests' answers, each for a retry of its own
QUIET_S = 5.0  # after which an attempt may be over; then twice as long, and so on
RETRY_WITHIN_S = 90.0  # clients that were refused come back sooner, or not at all


@dataclass(slots=True)
class Answer:
    """One request of an attempt, being answered: a part for each of its prompts."""

    key: bytes
    response_id: str
    done: asyncio.Future[list[dict[str, Any]]]
    parts: int = 1
    said: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    waiting: int = 0  # retries that wait for it: it must then outlive its own client
    claims: int = 0  # retries that have ever waited for it


@dataclass(slots=True)
class Spent:
    """What an attempt has used of its budget."""

    calls: int
    tokens: int


@dataclass(slots=True)
class Attempt:
    """The memory of one attempt."""

    next_seq: int | None = None
    first_seq: int | None = None  # where it began: what was accepted before, only the store knows
    in_flight: int = 0
    used_at: float = 0.0
    patience: float = QUIET_S  # how long it has to be quiet to be looked at
    spent: Spent | None = None  # None: not asked the store yet
    conversations: Conversations = field(default_factory=Conversations)
    # By what was asked. Identical requests are samples of their own; a retry is one of theirs.
    _running: dict[bytes, list[Answer]] = field(default_factory=dict[bytes, list[Answer]])
    _unanswered: dict[bytes, list[float]] = field(default_factory=dict[bytes, list[float]])
    """When each failed or was refused."""
    _answered: OrderedDict[bytes, tuple[bytes, ...]] = field(
        default_factory=OrderedDict[bytes, tuple[bytes, ...]]
    )
    """The last answer of each (a list of its parts) as JSON: its objects would take three times
    that. After recalled ones, several: the last is the next retry's, until one is left."""
    _answer_bytes: int = 0
    _missed: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict[bytes, tuple[bytes, ...]])
    """Recalled answers that their clients may not have heard: the next retries', the last first."""
    _looked_up: dict[bytes, None] = field(default_factory=dict[bytes, None])
    """What has been recalled, the oldest first."""

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(map(len, self._running.values()))

    async def take_seq(self, first: Callable[[], Awaitable[int]]) -> int:
        """The next number in the order of acceptance; ``first`` asks the store where to begin."""
        if self.next_seq is None:
            begin = await first()
            if self.next_seq is None:  # nobody else asked meanwhile
                self.next_seq = self.first_seq = begin
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    async def earlier(
        self, body: bytes, idempotency_key: str | None = None
    ) -> list[dict[str, Any]] | None:
        """The answer that a marked retry of this body asks for again, waited for if on its way.

        With an idempotency key there is one request it can be a retry of. Without, several
        identical ones may be about, and the retry belongs to one whose client got no answer. In
        that order: one that failed or was refused, one whose answer was lately given by another
        memory, one that runs (the oldest that no other retry waits for), and the last one
        answered, whose answer may have been lost.

        Returns:
            All its parts; None: it has to be sampled.
        """
        key = _key(body, idempotency_key)
        if self._take_unanswered(key):
            return None
        if missed := self._missed.pop(key, ()):
            *others, packed = missed
            self._answer_bytes -= len(packed)
            if others:
                self._missed[key] = tuple(others)
            if key not in self._answered:
                self._put(key, (packed,))
            return orjson.loads(packed)
        running = self._running.get(key)
        if running:
            return await _shared(min(running, key=lambda answer: (answer.waiting, answer.claims)))
        answers = self._answered.get(key)
        if answers is None:
            return None
        *others, packed = answers
        if others:
            self._put(key, tuple(others))
        return orjson.loads(packed)

    def knows(self, body: bytes, idempotency_key: str | None) -> bool:
        """Whether anything is remembered of such a request."""
        key = _key(body, idempotency_key)
        kept = (self._running, self._unanswered, self._answered, self._missed)
        return any(key in one for one in kept)

    def knows_all(self, body: bytes, idempotency_key: str | None) -> bool:
        """Whether there is nothing to be recalled of such requests."""
        looked_up = self.first_seq == 0 or _key(body, idempotency_key) in self._looked_up
        return looked_up and self.knows(body, idempotency_key)

    def recall(
        self,
        body: bytes,
        idempotency_key: str | None,
        told: Sequence[list[dict[str, Any]]],
        missed: Sequence[list[dict[str, Any]]],
        unanswered: int,
    ) -> None:
        """Takes over what somebody else remembers of such requests. ``trim`` when it is used.

        Args:
            told: the answers that were given (all parts of each), the one to be replayed first
                last.
            missed: likewise, but their clients may not have heard them.
            unanswered: how many failed and have not been retried.
        """
        key = _key(body, idempotency_key)
        for _ in range(min(unanswered, MAX_ANSWERS)):
            self._to_be_retried(key)
        if missed:
            packed = _packed(missed[-MAX_RECALLED:])
            self._answer_bytes += sum(map(len, packed)) - sum(map(len, self._missed.get(key, ())))
            self._missed[key] = packed
        own = self._answered.get(key, ())
        if told or own:
            self._put(key, (*_packed(told[-MAX_RECALLED:]), *own))
        self._looked_up[key] = None
        if len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def begin(self, body: bytes, idempotency_key: str | None, response_id: str) -> Answer:
        """A request is accepted, or one more part of it: all are accepted before one is run."""
        key = _key(body, idempotency_key)
        running = self._running.setdefault(key, [])
        for answer in running:
            if answer.response_id == response_id:
                answer.parts += 1
                return answer
        answer = Answer(key, response_id, asyncio.get_running_loop().create_future())
        running.append(answer)
        return answer

    def answered(self, answer: Answer, response: dict[str, Any]) -> None:
        """A part is answered; with the last one it is what retries get from now on."""
        answer.said.append(response)
        if len(answer.said) < answer.parts or answer.done.done():
            return
        self._end(answer)
        answer.said.sort(key=lambda part: [choice["index"] for choice in part["choices"]])
        answer.done.set_result(answer.said)
        self._put(answer.key, _packed([answer.said]))
        self.trim()

    def abandon(self, answer: Answer) -> None:
        """A part failed or was cancelled: a retry samples all of them again."""
        self._end(answer)
        if not answer.done.done():
            answer.done.cancel()
            if not answer.waiting:  # else its retry is here already
                self._to_be_retried(answer.key)

    def refused(self, body: bytes, idempotency_key: str | None) -> None:
        """It was told to come back: its retry must not be taken for another's."""
        self._to_be_retried(_key(body, idempotency_key))

    def _put(self, key: bytes, packed: tuple[bytes, ...]) -> None:
        self._answer_bytes += sum(map(len, packed)) - sum(map(len, self._answered.get(key, ())))
        self._answered[key] = packed
        self._answered.move_to_end(key)

    def trim(self) -> None:
        """Drops the oldest answers that are too many; the store has them."""
        while len(self._answered) > MAX_ANSWERS or self._answer_bytes > MAX_ANSWER_BYTES:
            kept = self._answered or self._missed
            self._answer_bytes -= sum(map(len, kept.pop(next(iter(kept)))))

    def _end(self, answer: Answer) -> None:
        running = self._running.get(answer.key, [])
        if answer in running:
            running.remove(answer)
            if not running:
                del self._running[answer.key]

    def _to_be_retried(self, key: bytes) -> None:
        self._unanswered.setdefault(key, []).append(time.monotonic())
        if len(self._unanswered) > MAX_ANSWERS:
            del self._unanswered[next(iter(self._unanswered))]

    def _take_unanswered(self, key: bytes) -> bool:
        """Whether such a request got no answer lately. Its retry takes its place."""
        now = time.monotonic()
        recent = [at for at in self._unanswered.pop(key, ()) if now - at < RETRY_WITHIN_S]
        if len(recent) > 1:
            self._unanswered[key] = recent[1:]
        return bool(recent)


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


async def _shared(answer: Answer) -> list[dict[str, Any]] | None:
    """The answer to a request that another client began; None: it failed."""
    answer.waiting += 1
    answer.claims += 1
    try:
        return await asyncio.shield(answer.done)
    except asyncio.CancelledError:
        if answer.done.cancelled():
            return None
        raise
    finally:
        answer.waiting -= 1


def _packed(told: Iterable[list[dict[str, Any]]]) -> tuple[bytes, ...]:
    # Copies: orjson's bytes keep the buffer of 8 KB that they were written into.
    return tuple(bytes(memoryview(orjson.dumps(one))) for one in told)


def _key(body: bytes, idempotency_key: str | None) -> bytes:
    salt = b"" if idempotency_key is None else idempotency_key.encode()
    return blake2b(salt + b"\0" + body if salt else body, digest_size=16).digest()
