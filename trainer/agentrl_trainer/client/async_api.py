"""The ``*_async`` twins of operations, for scripts written when the SDK had no futures to await.

Everything that a client returns can be awaited, so they add nothing; but they have the same
parameters as what they stand for, always, because they are made from it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

Operation = Callable[Concatenate[S, P], T]
Twin = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def awaited(operation: Callable[Concatenate[S, P], Awaitable[T]]) -> Twin[S, P, T]:
    """``await client.twin()`` is the operation's result."""

    @functools.wraps(operation)
    async def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await operation(self, *args, **kwargs)

    return _named(twin)


def submitted(operation: Operation[S, P, T]) -> Twin[S, P, T]:
    """``await client.twin()`` is what the operation returns at once, a future of its result."""

    @functools.wraps(operation)
    async def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return operation(self, *args, **kwargs)

    return _named(twin)


def made(operation: Callable[Concatenate[S, P], Awaitable[T]]) -> Twin[S, P, T]:
    """As ``awaited``, for what takes a while before it returns: it does so on another thread."""

    @functools.wraps(operation)
    async def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await (await asyncio.to_thread(operation, self, *args, **kwargs))

    return _named(twin)


def _named(twin: Twin[S, P, T]) -> Twin[S, P, T]:
    name = twin.__name__
    twin.__doc__ = f"``{name}``, in a coroutine."
    twin.__name__, twin.__qualname__ = f"{name}_async", f"{twin.__qualname__}_async"
    return twin
