"""Mark HTTP requests to the gateway with the rollout, agent and span that make them.

Patches public entry points of httpx, httpx2, requests and aiohttp. Requests to other hosts are left
alone, and no baggage is sent: frameworks put task data there. A request that cannot be marked is
sent as it is.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlsplit

import wrapt
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import RolloutContext, current_rollout
from agentrl_tracer.conventions import AGENT_HEADER, ROLLOUT_HEADER
from agentrl_tracer.import_hooks import on_import

logger = logging.getLogger("agentrl")

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ROLLOUT_PATH = re.compile(r"/rollouts/([^/?#]+)")
_MAX_NAME_LENGTH = 200

AgentName = Callable[[], str | None]


def mark_requests(agent_name: AgentName) -> None:
    """Patch the HTTP clients that are imported, now or later. Call once per process.

    Args:
        agent_name: returns the name of the agent that the current span works for.
    """
    mark = functools.partial(_mark, agent_name)
    for module in ("httpx", "httpx2"):
        on_import(module, functools.partial(_patch_send, mark, ("Client", "AsyncClient")))
    on_import("requests", functools.partial(_patch_send, mark, ("Session",)))
    on_import("aiohttp", functools.partial(_patch_aiohttp, mark))


def rollout_headers(
    url: str, agent_name: AgentName
) -> tuple[RolloutContext, dict[str, str]] | None:
    """Return the caller's rollout and the headers that name it.

    None when the request does not go to the rollout's gateway.
    """
    rollout = current_rollout()
    if rollout is None or _authority(url) != _authority(rollout.gateway):
        return None
    headers = {ROLLOUT_HEADER: rollout.key}
    TraceContextTextMapPropagator().inject(headers)
    agent = agent_name()
    if agent is not None:
        headers[AGENT_HEADER] = encode_name(agent)
    return rollout, headers


def encode_name(name: str) -> str:
    """Encode a name as a header value: percent-encoded except for printable ASCII."""
    return quote(" ".join(name.split())[:_MAX_NAME_LENGTH], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")


@functools.lru_cache(64)
def _authority(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("127.0.0.1" if host in _LOOPBACK else host), port


def _mark(agent_name: AgentName, url: str, headers: MutableMapping[str, str]) -> str | None:
    """Add the rollout's headers to a request; return a new URL if it must go to another path.

    A client may have been created for another rollout of this process. The code that makes the
    call decides, so a stale key and a stale rollout in the path are replaced.
    """
    try:
        found = rollout_headers(f"{url.partition('://')[0]}://{urlsplit(url).netloc}", agent_name)
        if found is None or ROLLOUT_HEADER in headers:
            return None
        rollout, ours = found
        for name, value in ours.items():
            if name not in headers:
                headers[name] = value
        for name, prefix in (("authorization", "Bearer "), ("x-api-key", "")):
            stale = headers.get(name, "")
            if "sk-agentrl-" in stale and rollout.key not in stale:
                headers[name] = prefix + rollout.key
        path = _ROLLOUT_PATH.search(url)
        if path is None or path[1] == rollout.rollout_id:
            return None
        return url[: path.start(1)] + rollout.rollout_id + url[path.end(1) :]
    except Exception:
        logger.debug("could not mark a request", exc_info=True)
        return None


Mark = Callable[[str, MutableMapping[str, str]], str | None]


def _patch_send(mark: Mark, clients: tuple[str, ...], module: ModuleType) -> None:
    def send(wrapped: Any, _client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["request"]
        moved = mark(str(request.url), request.headers)
        if moved is not None:
            request.url = type(request.url)(moved)
        return wrapped(*args, **kwargs)

    for client in clients:
        wrapt.wrap_function_wrapper(module, f"{client}.send", send)


def _patch_aiohttp(mark: Mark, module: ModuleType) -> None:
    """Add headers only: aiohttp offers no way to move a request to another URL."""

    async def on_request_start(_session: Any, _context: Any, params: Any) -> None:
        mark(str(params.url), params.headers)

    def init(wrapped: Any, _session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours = module.TraceConfig()
        ours.on_request_start.append(on_request_start)
        wrapped(*args, **kwargs | {"trace_configs": [*(kwargs.get("trace_configs") or ()), ours]})

    wrapt.wrap_function_wrapper(module, "ClientSession.__init__", init)
