"""One client connection that cannot hold on to memory: limits that uvicorn does not have.

Knows bytes, timers and what an unreadable request is told. Does not know routes or the app.

uvicorn with httptools reads a request's head whatever its size, waits for the rest of a request
forever, and keeps what a client does not read. Its flow control does bound a stream: ``send``
waits while more than 64 KiB are unread, and that reaches the sampler. What it lacks is an end to
the waiting.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agentrl_proxy.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class Limits:
    """How much, and how slowly."""

    head_bytes: int = 64 * 1024  # request line and headers together
    receive_s: float = 60.0  # for a whole request to arrive
    stall_s: float = 60.0  # without reading while an answer waits
    grace_s: int = 5  # for answers under way when the server is told to stop


class _HeadTooLarge(Exception):
    pass


class GuardedProtocol(HttpToolsProtocol):
    """httptools' protocol with ``Limits``; see ``guarded``."""

    limits = Limits()

    # Bytes that the parser took without handing anything on. In a head it collects until the end
    # of the headers (or of one value, however long), so this is what it holds.
    _held = 0
    _receiving: asyncio.TimerHandle | None = None  # runs while a request is not here entirely
    _stalled: asyncio.TimerHandle | None = None  # runs while the client does not read
    _whole = True  # no request has begun, or it is here entirely
    _refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whoever connects and says nothing is as idle as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_receiving()
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # --- reading

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if self._whole:
            return
        if self._held > self.limits.head_bytes:
            self._refuse(_head_too_large(self.limits.head_bytes))
        elif self._receiving is None:
            self._receiving = self.loop.call_later(self.limits.receive_s, self._too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._whole = False

    def on_headers_complete(self) -> None:
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
        if size > self.limits.head_bytes:
            self._refusal = _head_too_large(self.limits.head_bytes)
            raise _HeadTooLarge  # httptools wraps it; uvicorn then calls send_400_response
        self._held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        self._whole = True
        self._end_receiving()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Whatever httptools could not read, in OpenAI's shape."""
        self._refuse(self._refusal or invalid(None, msg, code="invalid_http"))

    def _too_slow(self) -> None:
        self._receiving = None
        if self.pipeline:  # it waits for the answer before it, which may take its time
            self._receiving = self.loop.call_later(self.limits.receive_s, self._too_slow)
            return
        message = f"the request did not arrive within {self.limits.receive_s:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        self._end_receiving()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.json()
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()

    def _end_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    # --- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            # Gone for good: its request is cancelled, as for any client that went away.
            self._stalled = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for it to be read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()


def guarded(limits: Limits) -> type[GuardedProtocol]:
    """The protocol class, for uvicorn's ``http`` setting."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})


def _head_too_large(limit: int) -> ApiError:
    message = f"the request line and headers are larger than {limit} bytes"
    return ApiError(431, message, code="headers_too_large")
