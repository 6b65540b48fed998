"""WorkResponse: what it sends, and what ends the work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl_proxy.errors import ApiError, unavailable
from agentrl_proxy.server.sse import WorkResponse


class Work:
    """Writes events, one a turn of the event loop; then fails, if told so."""

    waiting = 0

    def __init__(self, events: list[bytes], error: Exception | None = None) -> None:
        self.events, self.error = events, error
        self.canceled = False
        self.delivered: bool | None = None
        self.dialect = self

    async def run(self, write: Any) -> dict[str, Any]:
        try:
            for event in self.events:
                await write(event)
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.canceled = True
            raise
        return {}

    async def note_delivery(self, *, delivered: bool) -> None:
        self.delivered = delivered

    def failed(self, error: ApiError) -> bytes:
        return b"failed:" + (error.code or "").encode()


class Client:
    """The server's side of one ASGI request."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ended = False
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return
        self.bodies.append(message["body"])
        self.ended = not message["more_body"]

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def request(self, work: Work) -> None:
        await WorkResponse(work, stream=True)({"type": "http"}, self.receive, self.send)


async def test_events_leave_in_order() -> None:
    client, work = Client(), Work([b"a", b"b", b"c"])
    await client.request(work)
    assert work.delivered
    assert (client.bodies, client.ended) == ([b"a", b"b", b"c", b""], True)


async def test_events_of_one_turn_leave_together() -> None:
    class Burst(Work):
        async def run(self, write: Any) -> dict[str, Any]:
            for event in (b"a", b"b", b"c"):  # the first leaves at once
                await write(event)
            await asyncio.sleep(0.01)
            await write(b"d" * 70_000)
            await write(b"e" * 70_000)  # too much to hold
            await write(b"f")
            return {}

    client = Client()
    await client.request(Burst([]))
    assert client.bodies == [b"a", b"bc", b"d" * 70_000, b"e" * 70_000, b"f"]
    assert client.ended


async def test_an_error_after_the_first_event_is_the_last_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    await client.request(Work([b"a"], unavailable("gone", "sampler_error")))
    assert (client.bodies, client.ended) == ([b"a", b"failed:sampler_error"], True)
    await client.request(Work([b"a"], RuntimeError("bug")))
    assert client.bodies[-1] == b"failed:internal_error"
    assert "RuntimeError: bug" in caplog.text


async def test_an_error_before_the_first_event_is_raised() -> None:
    client = Client()
    with pytest.raises(ApiError):
        await client.request(Work([], unavailable("gone", "sampler_error")))
    assert client.bodies == []


async def test_a_client_that_disconnects_cancels_the_work() -> None:
    client, work = Client(), Work([b"a"] * 1000)
    request = asyncio.create_task(client.request(work))
    await asyncio.sleep(0)
    client.gone.set()
    await request  # the request itself ends in peace
    assert work.canceled
    assert work.delivered is False
    assert not client.ended


async def test_a_closing_server_cancels_the_request() -> None:
    client, work = Client(), Work([b"a"] * 1000)
    request = asyncio.create_task(client.request(work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert work.canceled
