"""What the SDK has asked for and fetches later: each request is done once, however often it comes.

Knows request ids and answers, nothing of what is computed. The SDK repeats a request that was not
answered in time, under the same number, and asks again for a result whose delivery failed: so an
answer is kept for a while after it was delivered.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

log = logging.getLogger(__name__)

Json = dict[str, Any]
Answer = bytes | Json

_REQUESTS = 20_000
"""Requests whose repetition is recognised."""
_RESULT_BYTES = 256 * 2**20
_SMALL = 1024  # what an answer that is no array is taken for, in bytes
_USER_ERRORS = (ValueError, FileExistsError, FileNotFoundError)


@dataclass(slots=True)
class _Promise:
    owner: str
    key: tuple[str, int] | None
    answer: Future[Answer] = field(default_factory=Future)
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when the work has its place in the queue: what is asked for next comes after it."""


class Promises:
    def __init__(self, result_bytes: int = _RESULT_BYTES) -> None:
        self._result_bytes = result_bytes
        self._lock = threading.Lock()
        self._made: dict[str, _Promise] = {}
        self._asked: OrderedDict[tuple[str, int], str] = OrderedDict()
        # Sizes of finished results, oldest first, and their sum.
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._delivered: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def make(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        """Begin ``work`` and say what its result is to be asked for by.

        A repetition, which has the number of its first try, begins nothing. What ``work`` raises is
        its result, but for HTTPException.
        """
        key = (owner, sequence) if sequence is not None else None
        with self._lock:
            known = self._asked.get(key) if key is not None else None
            if known is None:
                request = secrets.token_hex(8)
                promise = self._made[request] = _Promise(owner, key)
                promise.answer.set_running_or_notify_cancel()
                if key is not None:
                    self._asked[key] = request
                    while len(self._asked) > _REQUESTS:
                        self._asked.popitem(last=False)
            else:
                request, promise = known, self._made.get(known)
        if known is not None:
            if promise is not None:
                promise.begun.wait()
            return request

        assert promise is not None
        try:
            work().add_done_callback(lambda done: self._finish(request, promise, done))
        except HTTPException as error:
            with self._lock:
                del self._made[request]
                if key is not None:
                    self._asked.pop(key, None)
            promise.answer.set_result(_error(error))
            raise
        except Exception as error:
            failed: Future[Answer] = Future()
            failed.set_exception(error)
            self._finish(request, promise, failed)
        finally:
            promise.begun.set()
        return request

    def owner(self, request: str) -> str | None:
        """Whose it is; None where there is no such request, or no longer."""
        promise = self._made.get(request)
        return None if promise is None else promise.owner

    async def answer(self, request: str, within: float | None = None) -> Answer:
        """TimeoutError where it is not there ``within`` so many seconds.

        HTTPException 410 where there is no such request, or no longer.
        """
        promise = self._made.get(request)
        if promise is None:
            raise HTTPException(410, f"there is no request {request!r}, or no longer")
        waiting = asyncio.shield(asyncio.wrap_future(promise.answer))
        answer = await asyncio.wait_for(waiting, within)
        with self._lock:
            if (size := self._waiting.pop(request, None)) is not None:
                self._delivered[request] = size
        return answer

    def release(self, owners: str) -> None:
        """Forget the results of all whose owner begins so, fetched or not."""
        with self._lock:
            for finished in (self._waiting, self._delivered):
                for request in [r for r in finished if self._made[r].owner.startswith(owners)]:
                    self._bytes -= finished.pop(request)
                    del self._made[request]

    @property
    def kept(self) -> int:
        """How many requests are under way or have a result that can still be fetched."""
        return len(self._made)

    def _finish(self, request: str, promise: _Promise, done: Future[Answer]) -> None:
        try:
            answer = done.result()
        except BaseException as error:
            answer = _error(error)
        with self._lock:
            size = len(answer) if isinstance(answer, bytes) else _SMALL
            self._waiting[request] = size
            self._bytes += size
            # What was delivered goes first; the newest stays however large it is.
            while (
                self._bytes > self._result_bytes and len(self._waiting) + len(self._delivered) > 1
            ):
                oldest, size = (self._delivered or self._waiting).popitem(last=False)
                del self._made[oldest]
                self._bytes -= size
        promise.answer.set_result(answer)


def _error(error: BaseException) -> Json:
    # Text only: the exception would keep alive all that its frames hold.
    user = isinstance(error, _USER_ERRORS)
    if not user:
        log.error("a request failed", exc_info=error)
    text = f"{type(error).__name__}: {error}"
    return {"error": text, "category": "user" if user else "server"}
