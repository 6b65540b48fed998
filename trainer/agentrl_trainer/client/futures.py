"""Futures of operations: awaitable results, workers that run operations in order, and the
``*_async`` variants of methods that return futures. Does not know what is computed."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
Variant = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]

_here = threading.local()  # .worker: the OperationThread whose thread this is


class APIFuture(Future[T]):
    """The result of an operation that a client has started.

    ``future.result()`` waits; ``await future`` waits in a coroutine. Both raise what the operation
    raised. Canceling a waiting coroutine does not cancel the operation.
    """

    worker: OperationThread | None = None
    """That has yet to run something before the result is known."""

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: after ``timeout`` seconds; the operation continues.
            RuntimeError: the thread that would wait has yet to compute the result.
        """
        self._refuse_deadlock()
        return super().result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as Tinker
        """Wait for the result without blocking the event loop."""
        self._refuse_deadlock()
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self)), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """Return the result as a coroutine, for example for ``asyncio.create_task``."""
        return await self

    def future(self) -> Future[T]:
        """Return this future: it is one of ``concurrent.futures``."""
        return self

    def _refuse_deadlock(self) -> None:
        here = getattr(_here, "worker", None)
        if here is not None and here is self.worker and not self.done():
            raise RuntimeError(
                "a loss function may not wait for another operation of its own training thread: "
                "it would wait for itself"
            )

    def _set(self, work: Callable[[], T]) -> None:
        """Run ``work`` and keep its result, or what it raises."""
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


class OperationThread:
    """One thread that runs operations in order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=setattr, initargs=(_here, "worker", self)
        )
        self.shutdown = self._executor.shutdown
        """End the thread after everything submitted so far."""

    def submit(self, work: Callable[[], T]) -> APIFuture[T]:
        made: APIFuture[T] = APIFuture()
        made.worker = self

        def run() -> None:
            if made.set_running_or_notify_cancel():
                made._set(work)

        self._executor.submit(run)
        return made

    def start(self, operation: Callable[[], Future[T]]) -> APIFuture[T]:
        """Call ``operation`` in its turn; return the result of the future that it returns."""
        return chain(self.submit(operation), lambda started: started)


def finished(value: T) -> APIFuture[T]:
    """Return a future that is done already."""
    made: APIFuture[T] = APIFuture()
    made.set_result(value)
    return made


def map_future(future: Future[S], convert: Callable[[S], T]) -> APIFuture[T]:
    """Return a future of the converted result. It raises what ``convert`` raises."""
    return _after([future], lambda results: finished(convert(results[0])))


def chain(future: Future[S], start: Callable[[S], Future[T]]) -> APIFuture[T]:
    """Return the result of the future that ``start`` makes of ``future``'s result."""
    return _after([future], lambda results: start(results[0]))


def gather(several: Sequence[Future[T]]) -> APIFuture[list[T]]:
    """Return one future of all results, in order, or of the first error among them."""
    return _after(several, finished)


def _after(sources: Sequence[Future[S]], start: Callable[[list[S]], Future[T]]) -> APIFuture[T]:
    whole: APIFuture[T] = APIFuture()
    whole.worker = next(filter(None, map(_worker, sources)), None)
    whole.set_running_or_notify_cancel()  # what has begun cannot be canceled

    # Callbacks may run on several threads; list.pop is atomic, so exactly one finds the last.
    tickets = list(range(max(len(sources), 1)))

    def one_done(_: Any) -> None:
        if tickets.pop() > 0:
            return
        try:
            inner = start([source.result() for source in sources])
        except BaseException as error:
            whole.set_exception(error)
        else:
            whole.worker = _worker(inner)
            inner.add_done_callback(lambda done: whole._set(done.result))

    for source in sources or [finished(None)]:
        source.add_done_callback(one_done)
    return whole


def _worker(future: Future[Any]) -> OperationThread | None:
    return future.worker if isinstance(future, APIFuture) and not future.done() else None


# ---- ``*_async`` variants, for scripts that call Tinker's; every future can also be awaited


def awaited(
    method: Callable[Concatenate[S, P], Awaitable[T]], *, on_thread: bool = False
) -> Variant[S, P, T]:
    """Return a coroutine function that gives the method's result.

    ``on_thread``: call the method on another thread, because it takes a while to return.
    """

    async def variant(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        own: Callable[..., Awaitable[T]] = getattr(self, method.__name__)  # also a subclass's
        if on_thread:
            return await (await asyncio.to_thread(own, *args, **kwargs))
        return await own(*args, **kwargs)

    return _named(method, variant)


def submitted(method: Callable[Concatenate[S, P], T]) -> Variant[S, P, T]:
    """Return a coroutine function that gives what the method returns: a future of the result."""

    async def variant(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(self, method.__name__)(*args, **kwargs)

    return _named(method, variant)


def _named(method: Callable[..., Any], variant: Any) -> Any:
    functools.update_wrapper(variant, method)
    variant.__name__ += "_async"
    variant.__qualname__ += "_async"
    variant.__doc__ = f"Call ``{method.__name__}`` in a coroutine."
    return variant
