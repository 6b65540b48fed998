"""Futures of operations: awaitable results, and workers that run operations in order.

Knows concurrent and asyncio futures, not what is computed.
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

_SOURCES = "_agentrl_sources"  # attribute of a pending future: what must be done before it
_here = threading.local()  # .worker: the Worker whose thread this is


class APIFuture(Generic[T]):
    """The result of an operation that a client has started.

    ``future.result()`` waits; ``await future`` waits in a coroutine. Both raise what the operation
    raised. Canceling a waiting coroutine does not cancel the operation.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: after ``timeout`` seconds; the operation continues.
        """
        return wait(self._future, timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as Tinker
        """Wait for the result without blocking the event loop."""
        _refuse_deadlock(self._future)
        waiting = asyncio.shield(asyncio.wrap_future(self._future))
        return await asyncio.wait_for(waiting, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """Return the result as a coroutine, for example for ``asyncio.create_task``."""
        return await self

    def future(self) -> Future[T]:
        """Return the underlying future, for example for ``concurrent.futures.wait``."""
        return self._future

    def done(self) -> bool:
        return self._future.done()


class Worker:
    """One thread that runs operations in order."""

    def __init__(self, name: str) -> None:
        self._newest: Future[Any] = finished(None)
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=setattr, initargs=(_here, "worker", self)
        )

    def submit(self, work: Callable[[], T]) -> Future[T]:
        self._newest = depends(self._executor.submit(work), self)
        return self._newest

    def in_turn(self, start: Callable[[], Future[T]]) -> Future[T]:
        """Call ``start`` at once if the worker is idle, else after what was submitted before."""
        return start() if self._newest.done() else chain(self.submit(start), lambda inner: inner)

    def idle(self) -> None:
        """Wait until everything submitted so far has ended, in whatever way."""
        futures.wait([self._newest])

    def shutdown(self) -> None:
        """End the thread after everything submitted so far."""
        self._executor.shutdown()


def wait(future: Future[T], timeout: float | None = None) -> T:
    """Return the result; RuntimeError on the thread of the worker that has yet to compute it."""
    _refuse_deadlock(future)
    return future.result(timeout)


def depends(future: Future[T], *sources: Future[Any] | Worker) -> Future[T]:
    """Note that ``future`` cannot be done before ``sources``, so that ``wait`` finds deadlocks."""
    setattr(future, _SOURCES, sources)
    future.add_done_callback(lambda done: setattr(done, _SOURCES, ()))
    return future


def _refuse_deadlock(future: Future[Any]) -> None:
    worker = getattr(_here, "worker", None)
    if worker is not None and _needs(future, worker):
        raise RuntimeError(
            "a loss function may not wait for another operation of its own training thread: it "
            "would wait for itself"
        )


def _needs(future: Future[Any], worker: Worker) -> bool:
    return not future.done() and any(
        source is worker or (isinstance(source, Future) and _needs(source, worker))
        for source in getattr(future, _SOURCES, ())
    )


def finished(value: T) -> Future[T]:
    """Return a future that is done already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def map_future(future: Future[S], convert: Callable[[S], T]) -> Future[T]:
    """Return a future of the converted result. It raises what ``convert`` raises."""
    return _after([future], lambda results: finished(convert(results[0])))


def chain(future: Future[S], start: Callable[[S], Future[T]]) -> Future[T]:
    """Return the result of the future that ``start`` makes of ``future``'s result."""
    return _after([future], lambda results: start(results[0]))


def gather(several: Sequence[Future[T]]) -> Future[list[T]]:
    """Return one future of all results, in order, or of the first error among them."""
    return _after(several, finished)


def _after(sources: Sequence[Future[S]], start: Callable[[list[S]], Future[T]]) -> Future[T]:
    whole: Future[T] = depends(Future(), *sources)
    whole.set_running_or_notify_cancel()

    def copy(inner: Future[T]) -> None:
        try:
            whole.set_result(inner.result())
        except BaseException as error:
            whole.set_exception(error)

    def begin() -> None:
        try:
            inner = start([source.result() for source in sources])
        except BaseException as error:
            whole.set_exception(error)
        else:
            setattr(whole, _SOURCES, (inner,))
            inner.add_done_callback(copy)

    # Callbacks may run on several threads; list.pop is atomic, so exactly one finds the last.
    tickets = list(range(max(len(sources), 1)))

    def one_done(_: Any) -> None:
        if tickets.pop() == 0:
            begin()

    for source in sources:
        source.add_done_callback(one_done)
    if not sources:
        begin()
    return whole
