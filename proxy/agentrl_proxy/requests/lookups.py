"""Look things up in the store, in one query for all requests that wait.

Every request asks for the state of its attempt. Over a network, a thread and a round trip for each
would cost a busy gateway more than all the rest of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Lookup(Generic[T]):
    """What the store has by a key, as of a moment after it was asked for. For one event loop.

    Args:
        together: whether requests that wait are looked up together, in a thread.
        one: looks a key up, at once.
        several: looks keys up; those that the store does not have are missing.
    """

    def __init__(
        self, *, together: bool, one: Callable[[str], T | None],
        several: Callable[[Collection[str]], Mapping[str, T]],
    ) -> None:  # fmt: skip
        self._together, self._one, self._several = together, one, several
        self._waiting: dict[str, asyncio.Future[T | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def of(self, key: str) -> T | None:
        """Return what the store has, or None.

        Raises:
            StoreError: the database is away.
        """
        if not self._together:
            return self._one(key)
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        found = self._waiting[key]
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(found)  # others may wait for it

    async def _ask(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, {}
            try:
                known = await asyncio.to_thread(self._several, list(asked))
            except Exception as error:  # after a long wait for the store: enough for all
                asked, self._waiting = asked | self._waiting, {}
                for found in asked.values():
                    found.set_exception(error)
                    found.exception()  # its requests may be gone
            else:
                for key, found in asked.items():
                    found.set_result(known.get(key))
        self._asking = None
