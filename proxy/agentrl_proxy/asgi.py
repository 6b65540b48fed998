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
        task = asyncio.create_task(self._work.run(sender.write if self._stream else None))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._work.keep_alone:
                await asyncio.wait((task,))
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        finally:
            gone.cancel()
            if not task.done():  # this request itself was cancelled: the server is closing
                task.cancel()
                await asyncio.wait((task,))
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if self._stream:
                await sender.finish()
            else:
                await json_response(task.result())(scope, receive, send)
        elif not sender.started:
            raise error
        else:
            refusal = error if isinstance(error, ApiError) else internal_error()
            await sender.write(self._work.failed(refusal))
            await sender.finish()
            if refusal is not error:
                raise error


def internal_error() -> ApiError:
    return ApiError(500, "internal error of the gateway; its log says more", kind="server_error",
                    code="internal_error")  # fmt: skip


class _SseSender:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, data: bytes) -> None:
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
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
