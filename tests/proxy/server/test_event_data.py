"""Streams of server-sent events are read as they were sent, whatever their JSON contains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from agentrl_proxy.server.event_data import event_data

TEXTS = ["plain", "line\u2028separator", "next\x85line", "paragraph\u2029", "köln \x0b\x0c\x1c"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_characters_that_end_lines_elsewhere_are_kept(size: int) -> None:
    sent = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    stream = ": a comment\n\n" + "".join(f"data: {one}\n\n" for one in [*sent, "[DONE]"])
    data = stream.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async def read() -> list[str]:
        return [one.decode() async for one in event_data(httpx.Response(200, content=pieces()))]

    assert asyncio.run(read()) == [*sent, "[DONE]"]
