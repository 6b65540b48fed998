"""What one attempt has asked lately, so that a marked retry gets the answer that it asks for again.

Knows requests by a key, and parts of answers (chat completions) as JSON. Does not know HTTP,
tokens or the store. All of it may be lost: retries.py recalls it from the store.

Identical requests are samples of their own, and a retry is of one of them. Each is in one state:

    RUNNING -> ANSWERED     all parts of its answer are there: retries are given them
    RUNNING -> UNANSWERED   a part failed, or it was refused: its client comes back, or never
    UNANSWERED -> RUNNING   a retry has taken its place, and samples the parts that are missing
    MISSED -> ANSWERED      answered by an earlier process lately, and a retry was given it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import orjson

MAX_REQUESTS = 64  # different ones per attempt
MAX_ANSWER_BYTES = 2**20  # per attempt: with log-probs one answer can be tens of MB
MAX_RECALLED = 16  # identical requests' answers, each for a retry of its own
RETRY_WITHIN_S = 90.0  # clients that were refused come back sooner, or not at all

Part = dict[str, Any]
"""A chat completion with some of an answer's choices, in the tokens of one prompt."""


class State(IntEnum):
    """Of a request, in the order in which retries take identical ones."""

    UNANSWERED = 0
    MISSED = 1
    RUNNING = 2
    ANSWERED = 3


@dataclass(slots=True, eq=False)
class Asked:
    """One request, and what there is of its answer."""

    key: bytes
    state: State = State.RUNNING
    jobs: int = 0  # that make parts of its answer, and have not ended
    failed: bool = False  # one of them, or it was refused
    recalled: bool = False  # and given to no retry since
    waiting: int = 0  # retries that wait for it: it must then outlive its own client
    ended: asyncio.Event | None = field(default_factory=asyncio.Event)
    since: float = 0.0  # when it ended
    packed: list[bytes] = field(default_factory=list[bytes])
    """Its parts as JSON: their objects would take three times that."""

    @property
    def size(self) -> int:
        return sum(map(len, self.packed))

    def parts(self) -> list[Part]:
        """In the order of their choices."""
        parts: list[Part] = [orjson.loads(one) for one in self.packed]
        return sorted(parts, key=lambda part: [choice["index"] for choice in part["choices"]])

    def add(self, part: Part) -> None:
        # A copy: orjson's bytes keep the buffer of 8 KB that they were written into.
        self.packed.append(bytes(memoryview(orjson.dumps(part))))


@dataclass(slots=True)
class _Identical:
    requests: list[Asked] = field(default_factory=list[Asked])
    recalled: bool = False


class Requests:
    """An attempt's requests, by what was asked. At most ``MAX_REQUESTS`` different ones and
    ``MAX_ANSWER_BYTES`` of answers, besides what runs; the longest unused are dropped."""

    def __init__(self) -> None:
        self._asked: dict[bytes, _Identical] = {}  # the longest unused first
        self.held_bytes = 0  # of requests that do not run

    def knows(self, key: bytes) -> bool:
        """Whether anything is remembered of such a request."""
        return bool(self._lately(key))

    def was_recalled(self, key: bytes) -> bool:
        return key in self._asked and self._asked[key].recalled

    def begin(self, key: bytes) -> Asked:
        """A request is there. It is refused, or has ``jobs``, each of which ends."""
        asked = Asked(key)
        self._used(key).requests.append(asked)
        return asked

    async def earlier(self, key: bytes) -> Asked | None:
        """What a marked retry is the retry of: the first by state; of the running the oldest that
        no other retry waits for, and waited for; of the answered the last.

        Returns:
            One that is answered, or one that runs again now: what is missing of its answer is the
            caller's to sample. None: nothing is remembered.
        """
        while same := self._lately(key):
            asked = same[min(range(len(same)), key=lambda i: _turn(same[i], i))]
            if asked.state is not State.RUNNING:
                self._take(asked, same)
                self._trim()
                return asked
            self._trim()
            asked.waiting += 1
            try:
                assert asked.ended is not None
                await asked.ended.wait()
            finally:
                asked.waiting -= 1
            if asked.state is State.ANSWERED:
                return asked
        return None

    def recall(
        self,
        key: bytes,
        answered: Sequence[list[Part]],
        missed: Sequence[list[Part]],
        unanswered: Sequence[list[Part]],
    ) -> None:
        """Takes over what somebody else remembers of such requests, until ``earlier`` is asked.

        Args:
            answered: the answers that were given, the one to be replayed first last.
            missed: likewise, but their clients may not have heard them.
            unanswered: what there is of those that failed and have not been retried.
        """
        same = self._used(key)
        same.recalled = True
        kept = [
            (State.ANSWERED, answered[-MAX_RECALLED:]),
            (State.MISSED, missed[-MAX_RECALLED:]),
            (State.UNANSWERED, unanswered[-MAX_REQUESTS:]),
        ]
        own, same.requests = same.requests, []
        for state, answers in kept:
            for parts in answers:
                asked = Asked(key, recalled=True)
                for part in parts:
                    asked.add(part)
                same.requests.append(asked)
                self._rest(asked, state)
        same.requests += own

    def refused(self, asked: Asked, *, comes_back: bool) -> None:
        """Nothing of it will run. One that ``comes_back`` must not be taken for another's retry."""
        if not comes_back and not asked.packed:
            self._remove(asked)
        self.job_ended(asked, whole=False)

    def job_ended(self, asked: Asked, *, whole: bool) -> None:
        """A job has ended; before, it has added its part. Not ``whole``: choices are missing."""
        asked.jobs -= 1
        asked.failed |= not whole
        if asked.jobs > 0:
            return
        if not self._holds(asked):  # dropped as refused, or its attempt was forgotten meanwhile
            self._wake(asked)
            return
        same = self._used(asked.key)
        if not asked.failed:  # it is what retries get from now on; recalled ones wait for their own
            given = [o for o in same.requests if o.state is State.ANSWERED and not o.recalled]
            for one in given:
                self._remove(one)
        self._rest(asked, State.UNANSWERED if asked.failed else State.ANSWERED)
        failed = [one for one in same.requests if one.state is State.UNANSWERED]
        if len(failed) > MAX_REQUESTS:
            self._remove(failed[0])
        self._wake(asked)
        self._trim()

    def _take(self, asked: Asked, same: list[Asked]) -> None:
        """A retry gets what does not run: it takes the place of what failed, and one answer is kept
        for whoever asks again."""
        asked.recalled = False
        if asked.state is State.UNANSWERED:
            self.held_bytes -= asked.size
            asked.state, asked.failed, asked.ended = State.RUNNING, False, asyncio.Event()
        elif any(one.state is State.ANSWERED and one is not asked for one in same):
            self._remove(asked)
        else:
            asked.state = State.ANSWERED

    def _lately(self, key: bytes) -> list[Asked]:
        """Identical requests, without those whose clients will not come back."""
        if key not in self._asked:
            return []
        same = self._asked[key].requests
        long_ago = time.monotonic() - RETRY_WITHIN_S
        for one in [one for one in same if one.state is State.UNANSWERED and one.since < long_ago]:
            self._remove(one)
        return same

    def _used(self, key: bytes) -> _Identical:
        same = self._asked[key] = self._asked.pop(key, None) or _Identical()
        return same

    def _rest(self, asked: Asked, state: State) -> None:
        asked.state, asked.since = state, time.monotonic()
        self.held_bytes += asked.size

    @staticmethod
    def _wake(asked: Asked) -> None:
        if asked.ended is not None:
            asked.ended.set()
            asked.ended = None

    def _holds(self, asked: Asked) -> bool:
        return asked.key in self._asked and asked in self._asked[asked.key].requests

    def _remove(self, asked: Asked) -> None:
        if self._holds(asked):
            self._asked[asked.key].requests.remove(asked)
        if asked.state is not State.RUNNING:
            self.held_bytes -= asked.size

    def _trim(self) -> None:
        """Drops what was not used for longest; the store has it."""
        if len(self._asked) <= MAX_REQUESTS and self.held_bytes <= MAX_ANSWER_BYTES:
            return
        for key, same in list(self._asked.items()):
            for one in [one for one in same.requests if one.state is not State.RUNNING]:
                self._remove(one)
            same.recalled = False
            if not same.requests:
                del self._asked[key]
            if len(self._asked) <= MAX_REQUESTS and self.held_bytes <= MAX_ANSWER_BYTES:
                return


def _turn(asked: Asked, position: int) -> tuple[int, int, int]:
    last_first = asked.state in (State.MISSED, State.ANSWERED)
    return asked.state, asked.waiting, -position if last_first else position
