"""Server-sent events leave in as few writes as need be, in order, and wait for slow clients."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl_proxy.errors import ApiError, unavailable
from agentrl_proxy.server.sse import WorkResponse


class Said:
    """Work that writes what it is told, a list for each turn of the event loop."""

    keep_alone = False

    def __init__(self, turns: list[list[bytes]], error: Exception | None = None) -> None:
        self.turns, self.error = turns, error
        self.cancelled = False
        self.written = 0

    async def run(self, write: Any) -> dict[str, Any]:
        try:
            for turn in self.turns:
                for data in turn:
                    await write(data)
                    self.written += 1
                for _ in range(3):
                    await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return {}

    def failed(self, error: ApiError) -> bytes:
        return b"failed:" + (error.code or "").encode()


class Client:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status: int | None = None
        self.ended = False
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.reading.wait()
        self.bodies.append(message["body"])
        self.ended = not message["more_body"]

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def asks(self, work: Said) -> None:
        await WorkResponse(work, stream=True)({"type": "http"}, self.receive, self.send)


async def test_what_one_turn_makes_leaves_together() -> None:
    client = Client()
    await client.asks(Said([[b"a", b"b", b"c"], [b"d"], [b"e", b"f"]]))
    assert client.bodies == [b"a", b"bc", b"d", b"e", b"f", b""]
    assert client.ended
    assert client.status == 200


async def test_an_error_comes_after_what_was_said() -> None:
    client = Client()
    await client.asks(Said([[b"a", b"b", b"c"]], unavailable("gone", "sampler_error")))
    assert client.bodies == [b"a", b"bc", b"failed:sampler_error"]
    assert client.ended


async def test_a_client_that_does_not_read_holds_the_stream_up() -> None:
    client = Client()
    client.reading.clear()
    work = Said([[b"x" * 1000 for _ in range(1000)]])
    asked = asyncio.create_task(client.asks(work))
    await asyncio.sleep(0.01)
    assert work.written < 100
    client.reading.set()
    await asked
    assert b"".join(client.bodies) == b"x" * 1_000_000


async def test_a_client_that_leaves_cancels_the_work() -> None:
    client = Client()
    work = Said([[b"a"]] * 1000)
    asked = asyncio.create_task(client.asks(work))
    await asyncio.sleep(0)
    client.gone.set()
    await asked  # the request itself ends in peace
    assert work.cancelled
    assert not client.ended


async def test_a_server_that_closes_is_told_so() -> None:
    client = Client()
    work = Said([[b"a"]] * 1000)
    asked = asyncio.create_task(client.asks(work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    (outcome,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert work.cancelled
