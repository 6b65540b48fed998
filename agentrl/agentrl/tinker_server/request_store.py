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
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

log = logging.getLogger(__name__)

Json = dict[str, Any]
Answer = bytes | Json

_REQUESTS = 20_000
"""Sequence numbers whose repetition is recognized."""
_RESULT_BYTES = 256 * 2**20
_SMALL = 1024  # bytes that a JSON result counts
_USER_ERRORS = (ValueError, FileExistsError, FileNotFoundError)


@dataclass(slots=True)
class _Request:
    owner: str
    answer: Future[Answer] = field(default_factory=Future)
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when the work has its place in the queue, before that of later requests."""
    size: int | None = None
    """Bytes of the result; None while there is none."""
    delivered: bool = False


class RequestStore:
    def __init__(self, result_bytes: int = _RESULT_BYTES) -> None:
        self._result_bytes = result_bytes
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}  # oldest first
        self._by_sequence: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._bytes = 0

    def submit(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        """Start ``work`` and return the id of its result.

        A repetition of the owner's sequence number starts nothing and returns the same id. An error
        of ``work`` is its result, except HTTPException, which is raised.
        """
        key = (owner, sequence) if sequence is not None else None
        with self._lock:
            known = self._by_sequence.get(key) if key is not None else None
            request_id = known or secrets.token_hex(8)
            request = self._requests.get(request_id)
            if known is None:
                request = self._requests[request_id] = _Request(owner)
                request.answer.set_running_or_notify_cancel()
                if key is not None:
                    self._by_sequence[key] = request_id
                    while len(self._by_sequence) > _REQUESTS:
                        self._by_sequence.popitem(last=False)
        if known is not None or request is None:
            if request is not None:
                request.begun.wait()
            return request_id
        try:
            work().add_done_callback(lambda done: self._finish(request, done))
        except HTTPException as error:
            with self._lock:
                del self._requests[request_id]
                if key is not None:
                    self._by_sequence.pop(key, None)
            request.answer.set_result(_error(error))
            raise
        except Exception as error:
            failed: Future[Answer] = Future()
            failed.set_exception(error)
            self._finish(request, failed)
        finally:
            request.begun.set()
        return request_id

    def owner(self, request_id: str) -> str | None:
        """Return the owner of a request, or None if the request is unknown or forgotten."""
        request = self._requests.get(request_id)
        return None if request is None else request.owner

    async def answer(self, request_id: str, within: float | None = None) -> Answer:
        """Wait for a result.

        Raises:
            TimeoutError: it is not there after ``within`` seconds.
            HTTPException: 410, the request is unknown or forgotten.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise HTTPException(410, f"there is no request {request_id!r}, or no longer")
        waiting = asyncio.shield(asyncio.wrap_future(request.answer))
        answer = await asyncio.wait_for(waiting, within)
        request.delivered = True
        return answer

    def release(self, owners: str) -> None:
        """Forget the results of all owners that start with ``owners``."""
        with self._lock:
            for key, one in [*self._requests.items()]:
                if one.size is not None and one.owner.startswith(owners):
                    self._forget(key)

    @property
    def kept(self) -> int:
        """The number of requests that run, or whose result can be fetched."""
        return len(self._requests)

    def _finish(self, request: _Request, done: Future[Answer]) -> None:
        try:
            answer = done.result()
        except BaseException as error:
            answer = _error(error)
        with self._lock:
            request.size = len(answer) if isinstance(answer, bytes) else _SMALL
            self._bytes += request.size
            while self._bytes > self._result_bytes and self._forget_oldest(keep=request):
                pass
        request.answer.set_result(answer)

    def _forget_oldest(self, keep: _Request) -> bool:
        """Forget the oldest delivered result, else the oldest; False if there is none."""
        finished = [
            (not one.delivered, at, key)
            for at, (key, one) in enumerate(self._requests.items())
            if one.size is not None and one is not keep
        ]
        if finished:
            self._forget(min(finished)[2])
        return bool(finished)

    def _forget(self, request_id: str) -> None:
        self._bytes -= self._requests.pop(request_id).size or 0


def _error(error: BaseException) -> Json:
    # Text only: the exception would keep alive all that its frames hold.
    user = isinstance(error, _USER_ERRORS)
    if not user:
        log.error("a request failed", exc_info=error)
    text = f"{type(error).__name__}: {error}"
    return {"error": text, "category": "user" if user else "server"}
