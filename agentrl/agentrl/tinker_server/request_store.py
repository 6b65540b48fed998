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

    def __init__(self) -> None:
        self._turns: dict[str, threading.Lock] = {}  # by owner
        self._results: dict[str, Future[Answer]] = {}  # by request id, which starts with the owner
        self._numbered: OrderedDict[str, None] = OrderedDict()  # request ids, oldest first
        self._delivered: OrderedDict[str, int] = OrderedDict()  # bytes by request, oldest first
        self._bytes = 0

    def submit(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        """Start ``work`` and return the id of its result.

        A repetition of the owner's sequence number starts nothing and returns the same id, once the
        work has its place in the queue. An error of ``work`` is its result, except HTTPException,
        which is raised.
        """
        request_id = f"{owner}/{secrets.token_hex(8) if sequence is None else sequence}"
        with self._turns.setdefault(owner, threading.Lock()):
            if request_id in self._numbered:
                return request_id
            answer: Future[Answer] = Future()
            answer.set_running_or_notify_cancel()
            try:
                work().add_done_callback(lambda done: answer.set_result(_answer(done)))
            except HTTPException:
                raise
            except Exception as error:
                answer.set_result(_failure(error))
            self._results[request_id] = answer
            if sequence is not None:
                self._numbered[request_id] = None
                if len(self._numbered) > _REQUESTS:
                    self._numbered.popitem(last=False)
            return request_id

    async def answer(self, request_id: str, within: float | None = None) -> Answer:
        """Wait for a result.

        Raises:
            TimeoutError: it is not there after ``within`` seconds.
            HTTPException: 410, the request is unknown or forgotten.
        """
        if request_id not in self._results:
            raise HTTPException(410, f"there is no request {request_id!r}, or no longer")
        pending = asyncio.shield(asyncio.wrap_future(self._results[request_id]))
        answer = await asyncio.wait_for(pending, within)
        if request_id not in self._delivered:
            self._delivered[request_id] = len(answer) if isinstance(answer, bytes) else _SMALL
            self._bytes += self._delivered[request_id]
        while self._bytes > _DELIVERED_BYTES and len(self._delivered) > 1:
            oldest, size = self._delivered.popitem(last=False)
            self._results.pop(oldest, None)
            self._bytes -= size
        return answer

    def release(self, owners: str) -> None:
        """Forget the requests of all owners that start with ``owners``."""
        for request_id in [*self._results]:
            if request_id.startswith(owners):
                self._results.pop(request_id, None)


def _answer(done: Future[Answer]) -> Answer:
    try:
        return done.result()
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Json:
    category = "user" if isinstance(error, _USER_ERRORS) else "server"
    said = f"{type(error).__name__}: {error}"
    if category == "server":  # a full disk, or a fault of ours
        log.error("a request failed: %s", said, exc_info=not isinstance(error, OSError) and error)
    # Text only: the exception would keep alive all that its frames hold.
    return {"error": said, "category": category}
