"""Read request bodies within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive

from agentrl_proxy.dependencies import ConnectionLimits, GatewayStats
from agentrl_proxy.errors import ApiError, body_too_large, invalid, overloaded
from agentrl_proxy.server.large_requests import LargeRequests

_UNCOUNTED_BYTES = 64 * 1024  # of each body, so that small requests pass while large ones are stuck


@dataclass(eq=False)
class BodyReader:
    """Reads the bodies of one server."""

    max_bytes: int  # of one body, before and after decompression
    limits: ConnectionLimits
    stats: GatewayStats
    large: LargeRequests
    _arriving: int = 0  # counted bytes of bodies that have not arrived entirely

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """Return the decompressed body.

        Raises:
            ApiError: 413 too large, 408 too slow, 429 too many large bodies at once, 415 unknown
                encoding, 400 broken or incomplete.
        """
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise body_too_large(self.max_bytes)
        body = await self._receive(receive)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding not in ("gzip", "deflate"):
            message = f"content-encoding must be gzip or deflate; got {encoding[:40]!r}"
            raise ApiError(415, message, code="unsupported_encoding")
        return await self.large.run(True, _decompress, body, self.max_bytes)

    async def _receive(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = counted = 0
        more = True
        try:
            async with asyncio.timeout(self.limits.receive_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise invalid(None, "the client left before sending the whole body")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > self.max_bytes:
                        raise body_too_large(self.max_bytes)
                    new = max(size - _UNCOUNTED_BYTES - counted, 0)
                    if self._arriving + new > self.limits.receive_bytes:
                        self.stats.overloaded += 1
                        seconds = random.randint(1, 4)  # so that clients do not return together
                        raise overloaded(
                            f"too many large requests are arriving; retry in {seconds} s", seconds
                        )
                    self._arriving += new
                    counted += new
                    parts.append(part)
        except TimeoutError:
            message = f"the request body did not arrive within {self.limits.receive_s:g} s"
            close = {"connection": "close"}
            raise ApiError(408, message, code="request_timeout", headers=close) from None
        finally:
            self._arriving -= counted
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by the header
    try:
        out = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise invalid(None, f"the compressed body is broken: {error}") from None
    if len(out) > max_bytes:
        raise body_too_large(max_bytes)
    if not decompressor.eof:
        raise invalid(None, "the compressed body is broken: it ends too early")
    return out
