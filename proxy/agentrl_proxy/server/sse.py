"""Bodies in, answers out: the ASGI side that is the same for every route.

Knows ASGI messages, sizes and encodings. Does not know chat, stores or credentials.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl_proxy.errors import ApiError, body_too_large, invalid

Write = Callable[[bytes], Awaitable[None]]

_MOST_HELD = 64 * 1024  # bytes of events; then a stream waits for its client


async def read_body(request: Request, limit: int) -> bytes:
    """The body, unzipped, or 413 as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise body_too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise invalid(None, "the client left before sending the whole body") from None
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, f"content-encoding must be gzip or deflate; got {encoding[:40]!r}",
                       code="unsupported_encoding")  # fmt: skip
    return _unzip(body, limit)


def _unzip(body: bytes, limit: int) -> bytes:
    unzip = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, whichever the header says
    try:
        out = unzip.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(None, f"the compressed body is broken: {error}") from None
    if len(out) > limit:  # a small body may unzip to a huge one
        raise body_too_large(limit)
    if not unzip.eof:
        raise invalid(None, "the compressed body is broken: it ends too early")
    return out


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        orjson.dumps(value), status_code=status, headers=headers, media_type="application/json"
    )


class Work(Protocol):
    """A request being answered by a coroutine of its own."""

    async def run(self, write: Write | None) -> Any: ...

    @property
    def keep_alone(self) -> bool:
        """Whether it goes on although its client went away."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        ...


class WorkResponse(Response):
    """Runs work and sends what it makes, as one JSON body or as server-sent events.

    If the client goes away the work is cancelled. An error before the first byte is an ordinary
    error response; after it, an SSE event.
    """

    def __init__(self, work: Work, *, stream: bool) -> None:
        # No super().__init__: there is no body to render, and nothing else reads its fields.
        self._work = work
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _SseSender(send)
        here = asyncio.current_task()
        assert here is not None
        gone = False

        async def cancel_when_gone() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self._work.keep_alone:
                gone = True
                here.cancel()

        watcher = asyncio.create_task(cancel_when_gone())
        try:
            result = await self._work.run(sender.write if self._stream else None)
        except asyncio.CancelledError:
            if not gone:  # this request itself was cancelled: the server is closing
                raise
            here.uncancel()
            return
        except Exception as error:
            if not sender.started:
                raise
            refusal = error if isinstance(error, ApiError) else internal_error()
            await sender.finish(self._work.failed(refusal))
            if refusal is not error:
                raise
        else:
            watcher.cancel()
            if self._stream:
                await sender.finish()
            else:
                await json_response(result)(scope, receive, send)
        finally:
            watcher.cancel()
            sender.close()


def internal_error() -> ApiError:
    return ApiError(500, "internal error of the gateway; its log says more", kind="server_error",
                    code="internal_error")  # fmt: skip


class _SseSender:
    """Server-sent events, as few writes as need be.

    The first event of a turn of the event loop leaves at once; what else the turn makes leaves
    together at its end. Where the client reads slowly, ``write`` waits.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._in_turn = False  # something has left in this turn already
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._flushing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        if not self._in_turn and self._flushing is None:
            self._in_turn = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            await self._send_body(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _MOST_HELD:
            await self._flushed()

    async def finish(self, data: bytes = b"") -> None:
        """Sends what is held, ``data``, and the end."""
        if self._flushing is not None:
            await self._flushing
        held, self._held = self._held, []
        await self._send_body(b"".join([*held, data]), more=False)

    def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()

    def _end_turn(self) -> None:
        self._in_turn = False
        if self._held and self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def _flushed(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        try:
            while self._held:
                data = b"".join(self._held)
                self._held, self._held_bytes = [], 0
                await self._send_body(data)
        finally:
            self._flushing = None

    async def _send_body(self, data: bytes, *, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
                    ],
                }
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
