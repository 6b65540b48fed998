"""HTTP client of one vLLM server, and what is known about the server's health."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from agentrl_proxy.sampler import RefusedError

SILENCE_S = 60.0
"""A server that has not answered for this long is dead; a busy one only answers late."""
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0
"""Less than vLLM's 5 s, so that no request uses a connection that vLLM is about to close."""


class VllmClient:
    """Requests from threads (``blocking``) and from event loops (``connection``).

    ``recovery`` marks the server as healthy or lost; requests fail while it is lost.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        """``url``: of the server, without ``/v1``; ``unix:/path`` for a socket."""
        self.url = url
        self.trouble = "it has not been checked yet"
        """Why the server is lost; empty: it is not."""
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._options: dict[str, Any] = {
            "base_url": "http://vllm" if self._socket else url.rstrip("/").removesuffix("/v1"),
            "headers": {"authorization": f"Bearer {api_key}"} if api_key else {},
        }
        transport = httpx.HTTPTransport(uds=self._socket)
        self.blocking = httpx.Client(transport=transport, timeout=60.0, **self._options)
        self._heard_at = 0.0
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lifetime: AsyncGenerator[httpx.AsyncClient] | None = None

    @property
    def healthy(self) -> bool:
        return not self.trouble and time.monotonic() - self._heard_at < SILENCE_S

    def mark_healthy(self) -> None:
        self._heard_at, self.trouble = time.monotonic(), ""

    def mark_lost(self, why: str) -> None:
        """Fail requests from now on, and end those in progress: the server may never answer them,
        nor close their sockets."""
        self.trouble = why
        client, loop = self._client, self._loop
        if client is not None and loop is not None:
            self._client = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    def unavailable(self, error: Exception | None = None) -> RefusedError:
        """Return the error for a request that the server does not answer."""
        if self.healthy and error is not None:
            return RefusedError("stopped", f"vLLM does not answer: {type(error).__name__}: {error}")
        why = self.trouble or "it does not answer"
        return RefusedError("stopped", f"vLLM is out of use: {why}")

    async def connection(self) -> httpx.AsyncClient:
        """Return the running event loop's client, which closes when the loop ends.

        Raises:
            RefusedError: the server is lost.
        """
        if not self.healthy:
            raise self.unavailable()
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._lifetime = self._new_client()
            self._client = await anext(self._lifetime)  # does not suspend
            self._loop = loop
        return self._client

    async def _new_client(self) -> AsyncGenerator[httpx.AsyncClient]:
        """Yield one client; an event loop that ends closes its generators, and so the client."""
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEP_ALIVE_S
        )
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self._socket, limits=limits),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # sampling takes as long as it takes
            **self._options,
        ) as client:
            yield client
