"""Asynchronous variants (``*_async``) of a client's methods, made from the methods themselves.

Every result of a client can be awaited; these exist for scripts that call Tinker's ``*_async``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

Variant = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def awaited(
    method: Callable[Concatenate[S, P], Awaitable[T]], *, on_thread: bool = False
) -> Variant[S, P, T]:
    """Return a coroutine function that gives the method's result.

    ``on_thread``: call the method on another thread, because it takes a while to return.
    """

    async def variant(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if on_thread:
            return await (await asyncio.to_thread(method, self, *args, **kwargs))
        return await method(self, *args, **kwargs)

    return _named(method, variant)


def submitted(method: Callable[Concatenate[S, P], T]) -> Variant[S, P, T]:
    """Return a coroutine function that gives what the method returns: a future of the result."""

    async def variant(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    return _named(method, variant)


def _named(method: Callable[..., Any], variant: Any) -> Any:
    functools.update_wrapper(variant, method)
    variant.__name__, variant.__qualname__ = (
        f"{method.__name__}_async",
        f"{method.__qualname__}_async",
    )
    variant.__doc__ = f"Call ``{method.__name__}`` in a coroutine."
    return variant
