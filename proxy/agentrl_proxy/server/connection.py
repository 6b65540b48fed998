"""One client connection that cannot hold on to memory: limits that uvicorn does not have.

Knows bytes, timers and what an unreadable request is told. Does not know routes or the app.

uvicorn with httptools reads a request's head whatever its size, waits for the rest of a request
forever, and keeps what a client does not read. Its flow control does bound a stream: ``send``
waits while more than 64 KiB are unread, and that reaches the sampler. What it lacks is an end to
the waiting, and a bound on all bodies together that are not here entirely. And it stops reading a
client that pipelines, so that it does not see it leave: the end of what was sent comes last.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from agentrl_proxy.errors import ApiError, invalid, overloaded

_LINGER_S = 2.0
_IN_LINE = 4  # pipelined requests that are read while one is answered; then none is, for a while


@dataclass(frozen=True, slots=True)
class Limits:
    """How much, and how slowly."""

    head_bytes: int = 64 * 1024  # request line and headers together
    receive_s: float = 60.0  # for a whole request to arrive
    receive_bytes: int = 128 * 1024 * 1024
    """Of bodies that are not here entirely, all connections together. What is beyond it is told to
    come back (429), but ``always_bytes`` any body may send: small ones pass while large ones are
    stuck."""
    always_bytes: int = 64 * 1024
    stall_s: float = 60.0  # without reading while an answer waits
    grace_s: int = 5  # for answers under way when the server is told to stop


class _HeadTooLarge(Exception):
    pass


class Receiving:
    """What bodies hold that are not here entirely, of all connections of one server."""

    def __init__(self, limit: int, on_refusal: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.held = 0

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes; then they are held."""
        if self.held + size > self._limit:
            self._on_refusal()
            return False
        self.held += size
        return True


class _HeadWaits:
    """A cycle's transport. The head of an answer leaves with what follows it: each write is a
    system call, and the second one was a twelfth of what a whole call costs."""

    __slots__ = ("_head", "_transport", "close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.write: Callable[[bytes], None] = self._hold
        self.close = transport.close
        self.is_closing = transport.is_closing

    def _hold(self, head: bytes) -> None:
        if head.startswith(b"HTTP/1.1 100 "):  # no answer yet: the client waits for it
            self._transport.write(head)
            return
        self._head = head
        self.write = self._write_both

    def _write_both(self, data: bytes) -> None:
        self.write = self._transport.write
        self.write(self._head + data)


class GuardedProtocol(HttpToolsProtocol):
    """httptools' protocol with ``Limits``; see ``guarded``."""

    limits = Limits()
    receiving = Receiving(limits.receive_bytes, lambda: None)

    # Bytes that the parser took without handing anything on. In a head it collects until the end
    # of the headers (or of one value, however long), so this is what it holds.
    _held = 0
    _receiving: asyncio.TimerHandle | None = None  # runs while a request is not here entirely
    _stalled: asyncio.TimerHandle | None = None  # runs while the client does not read
    _whole = True  # no request has begun, or it is here entirely
    _refusal: ApiError | None = None
    _body = 0  # bytes of the body that is coming in
    _reserved = 0  # of those, what is held of the bound for all
    _heard_head = False  # of the request that is coming in: ``cycle`` is its own
    _cycle_before: RequestResponseCycle | None = None  # of the request before that one
    _deaf = False  # it was refused: nothing more is heard
    _owed: tuple[ApiError, bool] | None = None  # a refusal that waits for the answers before it
    _answering: RequestResponseCycle | None = None  # ``cycle``, unless more requests wait in line
    _lined: dict[RequestResponseCycle, int] | None = None  # of whole ones in line, what they hold

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whoever connects and says nothing is as idle as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._end_receiving()
        self._release()
        self.receiving.held -= sum((self._lined or {}).values())
        self._lined = None
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # --- reading

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._held += len(data)
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if self._whole or self._deaf:
            return
        if self._held > self.limits.head_bytes:
            self._refuse(_head_too_large(self.limits.head_bytes))
        elif self._receiving is None:
            self._receiving = self.loop.call_later(self.limits.receive_s, self._too_slow)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        if self._lined:
            self.receiving.held -= self._lined.pop(cycle, 0)
        super()._start_asgi_task(cycle, app)

    # The parser goes on to the end of what it was given, also when that made us deaf.

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        super().on_message_begin()
        self._whole = self._heard_head = False

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
        if size > self.limits.head_bytes:
            self._refusal = _head_too_large(self.limits.head_bytes)
            raise _HeadTooLarge  # httptools wraps it; uvicorn then calls send_400_response
        self._held = 0
        self._cycle_before = self.cycle
        super().on_headers_complete()
        self._heard_head = True
        if self.scope["method"] != "HEAD":  # nothing follows the head of its answer
            self.cycle.transport = _HeadWaits(self.transport)  # type: ignore[assignment]
        self._read_on()

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._held = 0
        self._body += len(body)
        if self._body > self.limits.always_bytes and not self._has_room():
            return
        super().on_body(body)
        self._read_on()

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._held = 0
        self._whole = True
        self._end_receiving()
        if self._reserved and self.cycle is not self._answering:
            self._lined = {**(self._lined or {}), self.cycle: self._reserved}
            self._reserved = 0  # it is held until it begins
        self._release()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:  # no later request is coming in; what comes is dropped
            self._release()
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last and self._owed is not None and not self.transport.is_closing():
            error, linger = self._owed
            self._unset_keepalive_if_required()
            self._tell(error)
            self._hang_up(linger=linger)

    def _read_on(self) -> None:
        """What waits in line is bounded; what comes behind it may be that the client leaves."""
        if self.cycle is not self._answering and len(self.pipeline) <= _IN_LINE:
            self.flow.resume_reading()

    def _has_room(self) -> bool:
        """Whether what has come of a large body may be kept; else its sender is told so."""
        if self.cycle.response_complete:
            return True
        more = self._body - self.limits.always_bytes - self._reserved
        if self.receiving.take(more):
            self._reserved += more
            return True
        seconds = random.randint(1, 4)  # spread out: they shall not all come back at once
        text = f"too many large requests are on their way here; come back in {seconds} s"
        self._refuse(overloaded(text, seconds), linger=True)
        return False

    def _release(self) -> None:
        self.receiving.held -= self._reserved
        self._body = self._reserved = 0

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

    def _refuse(self, error: ApiError, *, linger: bool = False) -> None:
        """Answers and closes, after the answers to the requests before this one. With ``linger``
        what the client still sends is read for a moment: closing on it would be a reset, which
        eats the answer."""
        self._end_receiving()
        own = self._heard_head and not self._whole  # whether ``cycle`` is the refused request's
        before = self._cycle_before if own else self.cycle
        waits = before is not None and not before.response_complete
        if not waits and not (own and self.cycle.response_started):
            self._tell(error)
        if not waits and not linger:
            self.transport.close()
            return
        self._deaf = True
        self._release()
        if own:
            self.cycle.disconnected = True  # for the app the client has gone
            self.cycle.body.clear()
            self.cycle.message_event.set()
        if not waits:
            self._hang_up(linger=linger)
            return
        if own and before is not None:  # it waits in line, last, and shall never begin
            self.pipeline.popleft()
            self.cycle = before
        self._owed = error, linger
        self.flow.resume_reading()  # a client that leaves shall be noticed

    def _tell(self, error: ApiError) -> None:
        body = error.json()
        head = b"content-type: application/json\r\nconnection: close\r\n"
        for name, value in (error.headers or {}).items():
            head += f"{name}: {value}\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)

    def _hang_up(self, *, linger: bool) -> None:
        if not linger:
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.close)

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


def guarded(limits: Limits, on_overload: Callable[[], None]) -> type[GuardedProtocol]:
    """The protocol class of one server, for uvicorn's ``http`` setting.

    Args:
        on_overload: is told of each request for whose body there was no room.
    """
    receiving = Receiving(limits.receive_bytes, on_overload)
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits, "receiving": receiving})


def _head_too_large(limit: int) -> ApiError:
    message = f"the request line and headers are larger than {limit} bytes"
    return ApiError(431, message, code="headers_too_large")
