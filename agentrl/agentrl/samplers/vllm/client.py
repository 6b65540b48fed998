"""HTTP client of one vLLM server, and what is known about the server's health."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from agentrl_proxy.sampler import RefusedError

SILENCE_S = 60.0
"""A server that has not answered for this long is dead; a busy one only answers late."""
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0
"""Less than vLLM's 5 s, so that no request uses a connection that vLLM is about to close."""
_NEVER = -math.inf


class VllmClient:
    """Requests from threads (``blocking``) and from event loops (``connection``, ``post``).

    ``recovery`` marks the server as healthy or lost; requests fail while it is lost.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        """``url``: of the server, without ``/v1``; ``unix:/path`` for a socket."""
        self.url = url
        self._base_url = url.rstrip("/").removesuffix("/v1")
        self._socket = None
        if url.startswith("unix:"):
            self._base_url, self._socket = "http://vllm", url.removeprefix("unix:")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._heard_at = _NEVER
        self.trouble = ""
        """Why the server is lost."""
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lifetime: AsyncGenerator[httpx.AsyncClient] | None = None

    @property
    def healthy(self) -> bool:
        return time.monotonic() - self._heard_at < SILENCE_S

    @property
    def lost(self) -> bool:
        """Whether ``mark_lost`` was called since the last ``mark_healthy``."""
        return self._heard_at == _NEVER

    def mark_healthy(self) -> None:
        self._heard_at, self.trouble = time.monotonic(), ""

    def mark_lost(self, why: str) -> None:
        """Fail requests from now on, and end those under way: the server may never answer them,
        nor close their sockets."""
        self._heard_at, self.trouble = _NEVER, why
        client, loop = self._client, self._loop
        if client is not None and loop is not None:
            self._client = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    def unavailable(self, error: Exception | None = None) -> RefusedError:
        """Return the error for a request that the server does not answer."""
        if self.healthy and error is not None:
            said = f"vLLM does not answer: {type(error).__name__}: {error}"
        else:
            said = f"vLLM is out of use: {self.trouble or silence()}"
        return RefusedError("stopped", said)

    def blocking(self) -> httpx.Client:
        return httpx.Client(
            base_url=self._base_url,
            headers=self._headers,
            transport=httpx.HTTPTransport(uds=self._socket),
            timeout=httpx.Timeout(60.0),
        )

    async def post(
        self, path: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> httpx.Response:
        """
        Raises:
            RefusedError: the server is lost.
            httpx.TransportError: it does not answer.
        """
        client = await self.connection()
        return await client.post(
            path, json=body, timeout=httpx.Timeout(limit_s, connect=_CONNECT_S)
        )

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
            base_url=self._base_url,
            headers=self._headers,
            transport=httpx.AsyncHTTPTransport(uds=self._socket, limits=limits),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # sampling takes as long as it takes
        ) as client:
            yield client


def silence() -> str:
    return f"it has not answered for {SILENCE_S:g} s"
