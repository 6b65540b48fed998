"""BodyReader: bounds of size, time and memory."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
from running_gateway import LIMITS

from agentrl_proxy.dependencies import GatewayStats
from agentrl_proxy.errors import ApiError
from agentrl_proxy.server.large_requests import LargeRequests
from agentrl_proxy.server.request_body import BodyReader

KIB = 1024
GZIPPED = gzip.compress(b"hello", mtime=0)  # a time would change the test ids


class Arrival:
    """A request whose body arrives part by part, as the test sends it."""

    def __init__(self, reader: BodyReader, parts: Iterable[bytes] = (), **headers: str) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for part in parts:
            self.send(part)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.reading = asyncio.create_task(reader.read(self.messages.get, named))

    def send(self, part: bytes, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def body(self) -> bytes:
        self.send(b"", more=False)
        return await self.reading

    async def error(self) -> ApiError:
        with pytest.raises(ApiError) as raised:
            await self.reading
        return raised.value


class Reader(BodyReader):
    def __init__(self, max_bytes: int = KIB, **limits: Any) -> None:
        super().__init__(max_bytes, replace(LIMITS, **limits), GatewayStats(), LargeRequests())


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    return Reader()


async def test_a_body_in_parts_is_read_whole(reader: Reader) -> None:
    assert await Arrival(reader, [b"a", b"b"]).body() == b"ab"


async def test_a_large_body_is_refused_as_soon_as_it_is_known(reader: Reader) -> None:
    assert (await Arrival(reader, [b"a" * 600, b"a" * 600]).error()).status == 413
    assert (await Arrival(reader, content_length="2000").error()).status == 413


@pytest.mark.parametrize("sent", [[], [b"a", b"b"]])
async def test_a_body_must_arrive_in_time(sent: list[bytes]) -> None:
    error = await Arrival(Reader(receive_s=0.02), sent).error()
    assert (error.status, error.code) == (408, "request_timeout")
    assert error.headers == {"connection": "close"}  # the rest must not look like a next request


async def test_arriving_bodies_share_one_bound_that_small_bodies_do_not_touch() -> None:
    reader = Reader(max_bytes=400 * KIB, receive_bytes=600 * KIB)
    large = [b"a" * 300 * KIB]
    stuck = [Arrival(reader, large) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    error = await Arrival(reader, large).error()
    assert (error.status, error.code) == (429, "overloaded")
    assert 1 <= int((error.headers or {})["retry-after"]) <= 4
    assert reader.stats.overloaded == 1
    assert await Arrival(reader, [b"a" * 64 * KIB]).body()
    assert [len(await one.body()) for one in stuck] == [300 * KIB] * 2


async def test_the_bound_is_whole_again_however_a_body_ends() -> None:
    reader = Reader(max_bytes=400 * KIB, receive_bytes=400 * KIB, receive_s=0.02)
    large = b"a" * 300 * KIB
    for _ in range(3):
        assert (await Arrival(reader, [large, large]).error()).status == 413
        assert (await Arrival(reader, [large]).error()).status == 408
        left = Arrival(reader, [large])
        left.messages.put_nowait({"type": "http.disconnect"})
        assert (await left.error()).status == 400
        canceled = Arrival(reader, [large])
        await asyncio.sleep(0)
        canceled.reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await canceled.reading
        assert await Arrival(reader, [large]).body() == large
    assert reader.stats.overloaded == 0


@pytest.mark.parametrize(
    ("encoding", "sent", "status"),
    [
        ("gzip", GZIPPED, None),
        ("Deflate", zlib.compress(b"hello"), None),
        ("identity", b"hello", None),
        ("br", b"hello", 415),
        ("gzip", b"hello", 400),
        ("gzip", GZIPPED[:-4], 400),
        ("gzip", gzip.compress(b"a" * 10_000, mtime=0), 413),
    ],
)
async def test_compressed_bodies(
    reader: Reader, encoding: str, sent: bytes, status: int | None
) -> None:
    arrival = Arrival(reader, [sent], content_encoding=encoding)
    if status is None:
        assert await arrival.body() == b"hello"
    else:
        arrival.send(b"", more=False)
        assert (await arrival.error()).status == status
