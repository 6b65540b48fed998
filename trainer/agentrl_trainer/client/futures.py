"""A result that is still being computed: for ``.result()`` and for ``await``.

Knows concurrent and asyncio futures, nothing of what is computed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
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
        return wait(self._future, timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as Tinker
        """``result``, without blocking the event loop."""
        _refuse_waiting_for_itself(self._future)
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


class Worker:
    """One thread that does operations in order. There, a wait for one of them would never end."""

    def __init__(self, name: str) -> None:
        self._token = object()
        self._newest: Future[Any] = finished(None)
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=_work_for, initargs=(self._token,)
        )

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._executor.submit(work)
        setattr(future, _WORKER, self._token)
        self._newest = future
        return future

    def in_turn(self, ask: Callable[[], Future[T]]) -> Future[T]:
        """What ``ask`` asks somebody else for: at once, or after what was submitted before."""
        return ask() if self._newest.done() else flattened(self.submit(ask))

    def idle(self) -> None:
        """Waits for what was submitted so far, however it ends."""
        futures.wait([self._newest])

    def shutdown(self) -> None:
        """When everything that was asked for is done."""
        self._executor.shutdown()


def wait(future: Future[T], timeout: float | None = None) -> T:
    """The result; RuntimeError on the thread of the worker that has yet to compute it."""
    _refuse_waiting_for_itself(future)
    return future.result(timeout)


def follows(future: Future[T], *sources: Future[Any]) -> Future[T]:
    """``future``, which cannot be done before ``sources`` are: ``wait`` then knows."""
    setattr(future, _SOURCES, sources)
    future.add_done_callback(lambda done: setattr(done, _SOURCES, ()))
    return future


_WORKER, _SOURCES = "_agentrl_worker", "_agentrl_sources"


def _work_for(token: object) -> None:
    _here.worker = token


def _refuse_waiting_for_itself(future: Future[Any]) -> None:
    here = getattr(_here, "worker", None)
    if here is not None and _needs(future, here):
        raise RuntimeError(
            "a loss function may not wait for another operation: it would wait for itself"
        )


def _needs(future: Future[Any], worker: object) -> bool:
    if future.done():
        return False
    if getattr(future, _WORKER, None) is worker:
        return True
    return any(_needs(source, worker) for source in getattr(future, _SOURCES, ()))


def finished(value: T) -> Future[T]:
    """A result that is there already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def map_future(future: Future[S], convert: Callable[[S], T]) -> Future[T]:
    """Another future, of the converted result. What ``convert`` raises, the future raises."""
    return _follow([future], lambda results: convert(results[0]))


def flattened(future: Future[Future[T]]) -> Future[T]:
    """The result of the future that ``future`` will give."""
    whole: Future[T] = follows(Future(), future)
    whole.set_running_or_notify_cancel()

    def answered(inner: Future[T]) -> None:
        try:
            whole.set_result(inner.result())
        except BaseException as error:
            whole.set_exception(error)

    def asked(outer: Future[Future[T]]) -> None:
        try:
            inner = outer.result()
        except BaseException as error:
            whole.set_exception(error)
        else:
            inner.add_done_callback(answered)

    future.add_done_callback(asked)
    return whole


def gather(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """One future of all results, in order; of the first error if there is any."""
    return _follow(futures, lambda results: results)


def _follow(futures: Sequence[Future[S]], convert: Callable[[list[S]], T]) -> Future[T]:
    whole: Future[T] = follows(Future(), *futures)
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
