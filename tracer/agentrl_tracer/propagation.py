"""Carry the current rollout and span into threads, subprocesses and requests to the gateway.

``opentelemetry-instrumentation-threading`` is not used: each release pins its siblings exactly, and
it carries neither our context variable nor future callbacks.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator, MutableMapping
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlsplit

import wrapt
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import ROLLOUT_VARIABLES, RolloutContext, chosen, current_rollout
from agentrl_tracer.conventions import AGENT_HEADER, REQUEST_HEADER, ROLLOUT_HEADER
from agentrl_tracer.delivery import GivenUp, report_of, watch_read, watch_send
from agentrl_tracer.import_hooks import on_import

logger = logging.getLogger("agentrl")

_ENV_POSITION = 10  # of ``env`` among Popen's positional arguments


def carry_into_threads() -> None:
    """Patch ``Thread.start``, ``ThreadPoolExecutor.submit`` and ``Future.add_done_callback``.

    Call once per process.
    """
    wrapt.wrap_function_wrapper(threading.Thread, "start", _start)
    wrapt.wrap_function_wrapper(futures.ThreadPoolExecutor, "submit", _submit)
    wrapt.wrap_function_wrapper(futures.Future, "add_done_callback", _add_done_callback)


def _start(
    wrapped: Any, thread: threading.Thread, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if chosen.get() is not None or trace.get_current_span().get_span_context().is_valid:
        carried = _carry(thread.run)

        def run() -> None:
            try:
                carried()
            finally:
                vars(thread).pop("run", None)  # break the reference cycle

        thread.run = run
    wrapped(*args, **kwargs)


def _submit(wrapped: Any, _pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function, *rest = args
    job = _carry(function)
    # A worker thread outlives this job: it must not inherit the caller's rollout.
    with _entered(None, otel.Context()):
        return wrapped(job, *rest, **kwargs)


def _add_done_callback(
    wrapped: Any, _future: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    wrapped(_carry(args[0] if args else kwargs["fn"]))


def _carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` bound to the current rollout and span.

    Other context variables stay the thread's own: executor initializers may set them.
    """
    rollout, spans = chosen.get(), otel.get_current()

    def run(*args: Any, **kwargs: Any) -> Any:
        with _entered(rollout, spans):
            return function(*args, **kwargs)

    return run


@contextmanager
def _entered(rollout: RolloutContext | None, spans: otel.Context) -> Iterator[None]:
    mark, token = chosen.set(rollout), otel.attach(spans)
    try:
        yield
    finally:
        otel.detach(token)
        chosen.reset(mark)


def carry_into_subprocesses(flush: Callable[[], bool]) -> None:
    """Patch ``subprocess.Popen`` and multiprocessing. Call once per process.

    Args:
        flush: sends queued spans; False when some did not arrive.
    """
    wrapt.wrap_function_wrapper(subprocess.Popen, "__init__", _popen)

    def last_flush() -> None:
        if not flush():
            logger.warning("agentrl: spans of a subprocess did not reach the gateway")

    def flush_at_exit(util: ModuleType) -> None:
        # A forked child of multiprocessing ends without atexit, so its last batch would be lost.
        util.register_after_fork(
            last_flush, lambda _: util.Finalize(None, last_flush, exitpriority=0)
        )

    on_import("multiprocessing.util", flush_at_exit)
    on_import("multiprocessing.process", _patch_processes)


def _popen(wrapped: Any, _popen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) <= _ENV_POSITION:
        kwargs = kwargs | {"env": _environment_of_child(kwargs.get("env"))}
    wrapped(*args, **kwargs)


def _environment_of_child(given: Any) -> Any:
    """Add the rollout's variables to an environment without them: that of a process that rollouts
    share, and one that the agent gives."""
    if (rollout := chosen.get()) is not None:
        return {**(os.environ if given is None else given), **_environment(rollout)}
    if given is not None and current_rollout() is not None:
        ours = {name: os.environ[name] for name in ROLLOUT_VARIABLES if name in os.environ}
        return {**ours, **given}
    return given


def _patch_processes(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "BaseProcess.start", _start_process)


def _start_process(
    wrapped: Any, process: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A process that is spawned gets its object pickled, and with it the rollout's environment.

    That of a fork server may be of an earlier rollout.
    """
    if (rollout := current_rollout()) is not None:
        state = vars(process)
        # First, so that it is entered before the target's module is imported.
        first = {"_agentrl_environment": _Environment(_environment(rollout))}
        state |= first | {name: state.pop(name) for name in [*state]}
    wrapped(*args, **kwargs)


class _Environment(dict[str, str]):
    """Variables that enter the environment of the process that unpickles them."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[dict[str, str]]]:
        return _enter_environment, (dict(self),)


def _enter_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _environment(rollout: RolloutContext) -> dict[str, str]:
    """Return what leads a subprocess to the rollout and to the current span."""
    env = dict(rollout.environment)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if "traceparent" in carrier:
        env["TRACEPARENT"] = carrier["traceparent"]
    return env


# --- requests


_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ROLLOUT_PATH = re.compile(r"/rollouts/([^/?#]+)")
_MAX_NAME_LENGTH = 200

Mark = Callable[[str, MutableMapping[str, str]], str | None]


def mark_requests(agent_name: Callable[[], str | None], given_up: GivenUp) -> None:
    """Mark requests to the gateway with the rollout, agent and span that make them.

    Patches public entry points of httpx, httpx2, requests and aiohttp, imported now or later. Call
    once per process.

    Args:
        agent_name: returns the name of the agent that the current span works for.
        given_up: is told of requests whose answers did not come through.
    """
    mark = partial(mark_request, agent_name)
    for module in ("httpx", "httpx2"):
        on_import(module, partial(_patch_send, mark, given_up, ("Client", "AsyncClient")))
    on_import("requests", partial(_patch_send, mark, given_up, ("Session",)))
    on_import("aiohttp", partial(_patch_aiohttp, mark, given_up))


def mark_request(
    agent_name: Callable[[], str | None], url: str, headers: MutableMapping[str, str]
) -> str | None:
    """Add the rollout's headers to a request; return a new URL if it must go to another path.

    Requests to other hosts are left alone, and no baggage is sent: frameworks put task data there.
    A request that cannot be marked is sent as it is. A client may have been created for another
    rollout of this process. The code that makes the call decides, so a stale key and a stale
    rollout in the path are replaced.
    """
    try:
        rollout = current_rollout()
        if rollout is None or _authority(url) != _authority(rollout.gateway):
            return None
        if ROLLOUT_HEADER in headers:
            return None
        ours = {ROLLOUT_HEADER: rollout.key, REQUEST_HEADER: secrets.token_hex(8)}
        TraceContextTextMapPropagator().inject(ours)
        agent = agent_name()
        if agent is not None:
            ours[AGENT_HEADER] = encode_name(agent)
        for name, value in ours.items():
            headers.setdefault(name, value)
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


def encode_name(name: str) -> str:
    """Encode a name as a header value: percent-encoded except for printable ASCII."""
    return quote(" ".join(name.split())[:_MAX_NAME_LENGTH], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")


def _authority(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("127.0.0.1" if host in _LOOPBACK else host), port


def _patch_send(
    mark: Mark, given_up: GivenUp, clients: tuple[str, ...], module: ModuleType
) -> None:
    def send(wrapped: Any, _client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["request"]
        moved = mark(str(request.url), request.headers)
        if moved is not None:
            request.url = type(request.url)(moved)
        return watch_send(given_up, request.headers, partial(wrapped, *args, **kwargs))

    for client in clients:
        wrapt.wrap_function_wrapper(module, f"{client}.send", send)


def _patch_aiohttp(mark: Mark, given_up: GivenUp, module: ModuleType) -> None:
    """Add headers only: aiohttp offers no way to move a request to another URL."""

    async def on_request_start(_session: Any, _context: Any, params: Any) -> None:
        mark(str(params.url), params.headers)

    async def on_request_exception(_session: Any, _context: Any, params: Any) -> None:
        if report := report_of(given_up, params.headers):
            report()

    def read(wrapped: Any, response: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        report = report_of(given_up, response.request_info.headers)
        reading = wrapped(*args, **kwargs)
        return reading if report is None else watch_read(reading, report)

    def init(wrapped: Any, _session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours = module.TraceConfig()
        ours.on_request_start.append(on_request_start)
        ours.on_request_exception.append(on_request_exception)
        wrapped(*args, **kwargs | {"trace_configs": [*(kwargs.get("trace_configs") or ()), ours]})

    wrapt.wrap_function_wrapper(module, "ClientSession.__init__", init)
    wrapt.wrap_function_wrapper(module, "ClientResponse.read", read)
