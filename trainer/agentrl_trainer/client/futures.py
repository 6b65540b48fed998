"""A result that is still being computed: for ``.result()`` and for ``await``.

Knows concurrent and asyncio futures, nothing of what is computed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")
_here = threading.local()


class APIFuture(Generic[T]):
    """What every operation of a client returns at once.

    ``future.result()`` waits; ``await future`` does so in a coroutine. Either raises what the
    operation raised. Cancelling a waiting coroutine does not cancel the operation.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after ``timeout`` seconds; the operation goes on then."""
        if getattr(_here, "forbidden", False) and not self._future.done():
            raise RuntimeError(
                "a loss function may not wait for another operation: it would wait for itself"
            )
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as Tinker
        """``result``, without blocking the event loop."""
        waiting = asyncio.shield(asyncio.wrap_future(self._future))
        return await asyncio.wait_for(waiting, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """For what takes coroutines only: ``asyncio.create_task(future.coroutine())``."""
        return await self

    def future(self) -> Future[T]:
        """For ``concurrent.futures.wait`` and its like."""
        return self._future

    def done(self) -> bool:
        return self._future.done()


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """On the thread that does the operations: there a wait for one would never end."""
    _here.forbidden = True
    try:
        yield
    finally:
        _here.forbidden = False


def map_future(future: Future[S], convert: Callable[[S], T]) -> Future[T]:
    """Another future, of the converted result. What ``convert`` raises, the future raises."""
    return _follow([future], lambda results: convert(results[0]))


def gather(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """One future of all results, in order; of the first error if there is any."""
    return _follow(futures, lambda results: results)


def _follow(futures: Sequence[Future[S]], convert: Callable[[list[S]], T]) -> Future[T]:
    whole: Future[T] = Future()
    whole.set_running_or_notify_cancel()

    def finish() -> None:
        try:
            whole.set_result(convert([future.result() for future in futures]))
        except BaseException as error:
            whole.set_exception(error)

    if not futures:
        finish()
        return whole

    # Callbacks may run on several threads; list.pop is atomic, so exactly one finds the last.
    tickets = list(range(len(futures)))

    def one_done(_: Future[S]) -> None:
        if tickets.pop() == 0:
            finish()

    for future in futures:
        future.add_done_callback(one_done)
    return whole
