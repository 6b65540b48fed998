"""Where calls leave and threads begin: marks the one, and carries the rollout into the other.

Knows the public entry points of httpx, httpx2, requests, aiohttp, threads, executors and
subprocesses. A request towards the gateway, and only that, is told which rollout and agent makes
it and which span it hangs under. No baggage: frameworks put task data there.

Nothing here may break the agent: what fails is logged and left out.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlsplit

from opentelemetry import context as otel
from opentelemetry import trace

from agentrl_tracer.context import RolloutContext, chosen, current_rollout
from agentrl_tracer.conventions import AGENT_HEADER, ROLLOUT_HEADER

logger = logging.getLogger("agentrl")

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ROLLOUT_PATH = re.compile(r"/rollouts/([^/?#]+)")
_LONGEST_NAME = 200
_installed: list[Any] = []  # the tracing that marks ask; the last one


def install_hooks(tracing: Any) -> None:
    """Patches what is loaded, and what will be when it is loaded. Once per process.

    Args:
        tracing: says which agent the current span works for (``RolloutTracing``).
    """
    if _installed:
        _installed[:] = [tracing]
        return
    _installed.append(tracing)
    _carry_into_threads()
    _tell_subprocesses()
    on_import("httpx", _hook_httpx)
    on_import("httpx2", _hook_httpx)
    on_import("requests", _hook_requests)
    on_import("aiohttp", _hook_aiohttp)
    on_import("multiprocessing.util", _flush_in_children)
    from agentrl_tracer.instrumentation.registry import watch_frameworks

    watch_frameworks()


# Requests


def marks(url: str) -> tuple[RolloutContext, dict[str, str]] | None:
    """The rollout that the calling code belongs to, and headers that say so.

    None where the request does not go to its gateway.
    """
    rollout = current_rollout()
    if rollout is None or _authority(url) != _authority(rollout.gateway):
        return None
    headers = {ROLLOUT_HEADER: rollout.key}
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        flags = int(span.trace_flags) & 0xFF
        headers["traceparent"] = f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}"
    agent = _installed[0].agent_name() if _installed else None
    if agent is not None:
        headers[AGENT_HEADER] = encoded_name(agent)
    return rollout, headers


def encoded_name(name: str) -> str:
    """A name as a header's value: percent-encoded, but for printable ASCII."""
    return quote(" ".join(name.split())[:_LONGEST_NAME], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")


@functools.lru_cache(64)
def _authority(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("127.0.0.1" if host in _LOOPBACK else host), port


def _mark(url: str, headers: MutableMapping[str, str]) -> str | None:
    """Adds our headers to a request; returns the URL it should go to, if that is another.

    A client may have been made for another rollout of this process (at import, or cached): base
    URL and key are then that one's, and the code that makes the call decides.
    """
    try:
        found = marks(f"{url.partition('://')[0]}://{urlsplit(url).netloc}")
        if found is None or ROLLOUT_HEADER in headers:
            return None
        rollout, ours = found
        for name, value in ours.items():
            if name not in headers:
                headers[name] = value
        for name in ("authorization", "x-api-key"):
            stale = headers.get(name, "")
            if "sk-agentrl-" in stale and rollout.key not in stale:
                headers[name] = f"Bearer {rollout.key}" if name == "authorization" else rollout.key
        path = _ROLLOUT_PATH.search(url)
        if path is None or path[1] == rollout.rollout_id:
            return None
        return url[: path.start(1)] + rollout.rollout_id + url[path.end(1) :]
    except Exception:
        logger.debug("could not mark a request", exc_info=True)
        return None


def _hook_httpx(module: ModuleType) -> None:
    def prepare(request: Any) -> None:
        moved = _mark(str(request.url), request.headers)
        if moved is not None:
            request.url = module.URL(moved)

    send, asend = module.Client.send, module.AsyncClient.send

    @functools.wraps(send)
    def marked_send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(request)
        return send(self, request, *args, **kwargs)

    @functools.wraps(asend)
    async def marked_asend(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(request)
        return await asend(self, request, *args, **kwargs)

    module.Client.send, module.AsyncClient.send = marked_send, marked_asend


def _hook_requests(module: ModuleType) -> None:
    send = module.Session.send

    @functools.wraps(send)
    def marked_send(self: Any, request: Any, **kwargs: Any) -> Any:
        moved = _mark(request.url, request.headers)
        if moved is not None:
            request.url = moved
        return send(self, request, **kwargs)

    module.Session.send = marked_send


def _hook_aiohttp(module: ModuleType) -> None:
    """Headers only: aiohttp lets nobody move a request to another URL."""

    async def on_request_start(_session: Any, _context: Any, params: Any) -> None:
        _mark(str(params.url), params.headers)

    init = module.ClientSession.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        ours = module.TraceConfig()
        ours.on_request_start.append(on_request_start)
        kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), ours]
        init(self, *args, **kwargs)

    module.ClientSession.__init__ = __init__


# Threads and subprocesses


@contextmanager
def _inside(rollout: RolloutContext | None, spans: otel.Context) -> Iterator[None]:
    mark, token = chosen.set(rollout), otel.attach(spans)
    try:
        yield
    finally:
        otel.detach(token)
        chosen.reset(mark)


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which will run with the rollout and span of now, wherever it runs.

    Not the whole context, which executors' initialisers and others count on to be the thread's.
    """
    rollout, spans = chosen.get(), otel.get_current()

    def run(*args: Any, **kwargs: Any) -> Any:
        with _inside(rollout, spans):
            return function(*args, **kwargs)

    return run


def _carry_into_threads() -> None:
    start, submit = threading.Thread.start, futures.ThreadPoolExecutor.submit
    add_done_callback = futures.Future.add_done_callback

    @functools.wraps(start)
    def carrying_start(self: threading.Thread) -> None:
        if chosen.get() is not None or trace.get_current_span().get_span_context().is_valid:
            inner = _carried(self.run)

            def run() -> None:
                try:
                    inner()
                finally:
                    vars(self).pop("run", None)  # it holds us

            self.run = run  # of the instance: subclasses have their own
        start(self)

    @functools.wraps(submit)
    def carrying_submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        work = _carried(fn)
        # A new worker thread serves whoever comes: it must not inherit this caller's rollout.
        with _inside(None, otel.Context()):
            return submit(self, work, *args, **kwargs)

    @functools.wraps(add_done_callback)
    def carrying_callback(self: Any, fn: Any) -> None:
        add_done_callback(self, _carried(fn))

    threading.Thread.start = carrying_start
    futures.ThreadPoolExecutor.submit = carrying_submit
    futures.Future.add_done_callback = carrying_callback


def _flush_in_children(util: ModuleType) -> None:
    """A forked child of multiprocessing ends without atexit, and its last batch would be lost."""

    def in_child(_: Any) -> None:
        util.Finalize(None, _flush, exitpriority=0)

    util.register_after_fork(_flush, in_child)


def _flush() -> None:
    from agentrl_tracer.provider import flush

    if not flush():
        logger.warning("agentrl: spans of a subprocess did not reach the gateway")


def _tell_subprocesses() -> None:
    """Where rollouts share a process its environment is nobody's: subprocesses get their own."""
    init = subprocess.Popen.__init__
    env_position = 11  # counted with self

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        rollout = chosen.get()
        if rollout is not None and rollout.environment and len(args) < env_position - 1:
            given = kwargs.get("env")
            env = {**(os.environ if given is None else given), **rollout.environment}
            span = trace.get_current_span().get_span_context()
            if span.is_valid:
                env["TRACEPARENT"] = f"00-{span.trace_id:032x}-{span.span_id:016x}-01"
            kwargs["env"] = env
        init(self, *args, **kwargs)

    subprocess.Popen.__init__ = __init__


# Imports


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls back when the module ``name`` has been imported: now, if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _call(callback, module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(callback)


def _call(callback: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:
        logger.warning("agentrl cannot watch %s", module.__name__, exc_info=True)


class _Finder(MetaPathFinder):
    """Finds nothing itself: lets the others find, and follows the loading."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)  # once; and not while we look ourselves
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = callbacks
            return None
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, callbacks: list[Callable[[ModuleType], None]]) -> None:
        self._inner, self._callbacks = inner, callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on it is as if we had not been there.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        for callback in self._callbacks:
            _call(callback, module)
