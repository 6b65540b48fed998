"""Work on large requests in a thread, while the event loop goes on answering the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P, _T = ParamSpec("_P"), TypeVar("_T")

_LARGE_BYTES = 32 * 1024
_MANY_OBJECTS = 128  # messages, tools, parts


def is_large(body: bytes) -> bool:
    """Whether reading, rendering and tokenizing a body takes more than some ten milliseconds."""
    return len(body) > _LARGE_BYTES or body.count(b"{") > _MANY_OBJECTS


class LargeRequests:
    """One at a time, in order of arrival, so that they cannot take all CPUs.

    Python code in the thread yields to the event loop every ``sys.getswitchinterval()``. What does
    not yield (parsing JSON) is bounded by protocols.fields.MAX_MARKS and the body's size.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-large-requests")

    async def run(
        self, large: bool, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what ``work`` returns; from the thread if the request is large."""
        if not large:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))
