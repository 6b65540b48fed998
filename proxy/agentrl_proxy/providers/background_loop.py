"""Run LiteLLM on an event loop of its own, in a thread.

LiteLLM computes for seconds over thousands of messages or megabytes of images. On the gateway's
loop no other request would be answered meanwhile. In a thread, Python code gives way to the
gateway's loop every ``sys.getswitchinterval()``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

log = logging.getLogger("agentrl.proxy")

_T = TypeVar("_T")
_CLOSE_S = 5.0  # LiteLLM may be computing


class BackgroundLoop:
    """An event loop in a thread. Its connections and locks must not be used on another loop.

    Args:
        closing: runs on the loop before it ends.
    """

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ending = asyncio.Event()
        started = concurrent.futures.Future[asyncio.AbstractEventLoop]()

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_log_without_detail)
            started.set_result(loop)
            await self._ending.wait()
            await closing()

        self._thread = threading.Thread(
            target=lambda: uvloop.run(serve()), name="agentrl-litellm", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what ``work`` returns there. If this is canceled, it is canceled there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def iterate(self, items: AsyncIterator[_T]) -> AsyncGenerator[_T]:
        """Yield what is made there, without making it wait. Close this to cancel it."""
        here, made = asyncio.get_running_loop(), asyncio.Queue[_T | None]()

        async def give() -> None:
            try:
                async for item in items:
                    here.call_soon_threadsafe(made.put_nowait, item)
            finally:
                here.call_soon_threadsafe(made.put_nowait, None)

        giving = asyncio.run_coroutine_threadsafe(give(), self._loop)
        try:
            while (item := await made.get()) is not None:
                yield item
            await asyncio.wrap_future(giving)  # raises what it raised
        finally:
            giving.cancel()

    async def close(self) -> None:
        """Cancel what runs there and end the thread."""
        self._loop.call_soon_threadsafe(self._ending.set)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)


def _log_without_detail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that has no caller. It may quote a key."""
    error = context.get("exception")
    log.warning("LiteLLM: %s (%s)", context["message"], type(error).__name__)
