"""Read a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

_FIELD = b"data: "


async def event_data(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each event, one line each, of a server that ends lines with ``\\n``.

    ``httpx.Response.aiter_lines`` also splits at U+2028, U+0085 and others, which JSON may contain.
    """
    rest = b""
    async for received in answer.aiter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(_FIELD):
                yield line.removeprefix(_FIELD).rstrip(b"\r")
