"""Tell whether an answer's last byte was given to a connection that its client had not closed.

uvicorn drops what is sent to a closed connection without a word, so the protocol tells it here.
What the kernel has taken counts as given: whether the client reads it is not known on this side.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Protocol

_LOOK_S = 0.05  # between looks at what a slow client has not taken


class Connection(Protocol):
    lost: bool
    """Bytes of an answer found it closed, or were dropped."""

    def give(self) -> None:
        """Write what is held, and note whether the client has closed the connection."""
        ...

    def get_write_buffer_size(self) -> int: ...


connection: ContextVar[Connection | None] = ContextVar("connection", default=None)
"""That of the request which this task answers; None with a server other than ours."""


async def is_delivered() -> bool:
    """Wait, after the last bytes of an answer were sent, until they are given or lost."""
    mine = connection.get()
    if mine is None:
        return True
    mine.give()
    await asyncio.sleep(0)  # uvloop writes at the end of a turn
    while not mine.lost and mine.get_write_buffer_size():  # noqa: ASYNC110 (slow clients only)
        await asyncio.sleep(_LOOK_S)
    return not mine.lost
