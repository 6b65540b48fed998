"""Requests whose results the SDK fetches later: each is done once, however often it is sent.

The SDK repeats a request that was not answered in time, under the same sequence number, and fetches
a result again if its delivery failed, so a result is kept for a while after it was delivered.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastapi import HTTPException

log = logging.getLogger(__name__)

Json = dict[str, Any]
Answer = bytes | Json

_REQUESTS = 20_000
"""Sequence numbers whose repetition is recognized."""
_DELIVERED_BYTES = 256 * 2**20
"""Of delivered results that are kept, the newest ones."""
_SMALL = 1024  # bytes that a JSON result counts
_USER_ERRORS = (ValueError, FileExistsError, FileNotFoundError)


class RequestStore:
    """Results stay until they are fetched or their session ends, and for a while after that."""

    def __init__(self, delivered_bytes: int = _DELIVERED_BYTES) -> None:
        self._delivered_bytes = delivered_bytes
        self._turns: dict[str, threading.Lock] = {}  # by owner
        self._results: dict[str, tuple[str, Future[Answer]]] = {}  # with the owner of each
        self._by_sequence: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._delivered: OrderedDict[str, int] = OrderedDict()  # bytes by request, oldest first
        self._bytes = 0

    def submit(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        """Start ``work`` and return the id of its result.

        A repetition of the owner's sequence number starts nothing and returns the same id, once the
        work has its place in the queue. An error of ``work`` is its result, except HTTPException,
        which is raised.
        """
        with self._turns.setdefault(owner, threading.Lock()):
            if sequence is not None and (known := self._by_sequence.get((owner, sequence))):
                return known
            answer: Future[Answer] = Future()
            answer.set_running_or_notify_cancel()
            try:
                work().add_done_callback(lambda done: answer.set_result(_answer(done)))
            except HTTPException:
                raise
            except Exception as error:
                answer.set_result(_failure(error))
            request_id = secrets.token_hex(8)
            self._results[request_id] = (owner, answer)
            if sequence is not None:
                self._by_sequence[owner, sequence] = request_id
                while len(self._by_sequence) > _REQUESTS:
                    self._by_sequence.popitem(last=False)
            return request_id

    async def answer(self, request_id: str, within: float | None = None) -> Answer:
        """Wait for a result.

        Raises:
            TimeoutError: it is not there after ``within`` seconds.
            HTTPException: 410, the request is unknown or forgotten.
        """
        if request_id not in self._results:
            raise HTTPException(410, f"there is no request {request_id!r}, or no longer")
        _, future = self._results[request_id]
        answer = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), within)
        if request_id not in self._delivered:
            self._delivered[request_id] = len(answer) if isinstance(answer, bytes) else _SMALL
            self._bytes += self._delivered[request_id]
        while self._bytes > self._delivered_bytes and len(self._delivered) > 1:
            oldest, size = self._delivered.popitem(last=False)
            self._results.pop(oldest, None)
            self._bytes -= size
        return answer

    def release(self, owners: str) -> None:
        """Forget the requests of all owners that start with ``owners``."""
        for request_id, (owner, _) in [*self._results.items()]:
            if owner.startswith(owners):
                self._results.pop(request_id, None)


def _answer(done: Future[Answer]) -> Answer:
    try:
        return done.result()
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Json:
    # Text only: the exception would keep alive all that its frames hold.
    user = isinstance(error, _USER_ERRORS)
    if not user:
        log.error("a request failed", exc_info=error)
    text = f"{type(error).__name__}: {error}"
    return {"error": text, "category": "user" if user else "server"}
