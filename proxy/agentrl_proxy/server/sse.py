"""Send answers: one JSON body, or a stream of server-sent events.

``sse-starlette`` is not used: it costs 2 ms of CPU for 64 events where this costs 0.7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl_proxy.errors import ApiError, internal_error
from agentrl_proxy.server.delivery import is_delivered

log = logging.getLogger("agentrl.proxy")

Write = Callable[[bytes], Awaitable[None]]

_MAX_HELD_BYTES = 64 * 1024

_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold the events back
    ],
}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        orjson.dumps(value), status_code=status, headers=headers, media_type="application/json"
    )


class Dialect(Protocol):
    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        ...


class Work(Protocol):
    """Makes an answer: ``requests.lifecycle.ClientRequest``."""

    waiting: int
    """Retries that wait for the answer."""

    @property
    def dialect(self) -> Dialect: ...

    async def run(self, write: Write | None) -> Any: ...

    async def note_delivery(self, *, delivered: bool) -> None:
        """Take note of whether the client got the whole answer, which ``run`` returned."""
        ...


class WorkResponse(Response):
    """Runs work and sends its answer. The work is canceled when the client disconnects, unless a
    retry of it waits for the answer.

    An error before the first event is raised, for an ordinary error response; a later one becomes
    the stream's last event.
    """

    def __init__(self, work: Work, *, stream: bool) -> None:
        # No super().__init__: there is no body to render.
        self._work = work
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = asyncio.current_task()
        assert request is not None
        events, disconnected = _EventSender(send), False

        async def cancel_on_disconnect() -> None:
            nonlocal disconnected
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self._work.waiting:
                disconnected = True
                request.cancel()

        watcher = asyncio.create_task(cancel_on_disconnect())
        try:
            result = await self._work.run(events.write if self._stream else None)
        except asyncio.CancelledError:
            await self._work.note_delivery(delivered=False)
            if not disconnected:  # the server is closing
                raise
            request.uncancel()
        except Exception as error:
            if not events.started:
                raise
            refusal = error if isinstance(error, ApiError) else internal_error()
            if refusal is not error:
                log.exception("a stream failed")
            await events.flush(self._work.dialect.failed(refusal), more=False)
        else:
            watcher.cancel()
            if self._stream:
                await events.flush(more=False)
            else:
                body = orjson.dumps(result)  # a Response would take longer
                length = (b"content-length", b"%d" % len(body))
                headers = [length, (b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body})
            await self._work.note_delivery(delivered=await is_delivered())
        finally:
            watcher.cancel()
            events.close()


class _EventSender:
    """Sends the first event of a turn of the event loop at once, and the turn's others joined.

    uvicorn takes about 10 us for each ``send``, and a sampler may give many tokens in a turn.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._sending = asyncio.Lock()
        self._in_turn = False  # an event of this turn has left
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._flushing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Send an event now or at the end of the turn. Waits while the client reads slowly."""
        if not self._in_turn:
            self._in_turn = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            await self.flush(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _MAX_HELD_BYTES:
            await self.flush()

    async def flush(self, data: bytes = b"", *, more: bool = True) -> None:
        """Send the held events and ``data``."""
        async with self._sending:
            if self._held:
                data = b"".join([*self._held, data])
                self._held, self._held_bytes = [], 0
            if not self.started:
                self.started = True
                await self._send(_STREAM_START)
            if data or not more:
                await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()

    def _end_turn(self) -> None:
        self._in_turn = False
        if self._held:
            self._flushing = asyncio.create_task(self.flush())
