"""Carry the current rollout and span into threads, executor jobs, callbacks and subprocesses.

``opentelemetry-instrumentation-threading`` is not used: each release pins its siblings exactly, and
it carries neither our context variable nor future callbacks.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import wrapt
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import RolloutContext, chosen
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
    """Patch ``subprocess.Popen`` and hook into multiprocessing. Call once per process.

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


def _popen(wrapped: Any, _popen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Where rollouts share a process, its environment names none of them: add the rollout's own."""
    rollout = chosen.get()
    if rollout is not None and rollout.environment and len(args) <= _ENV_POSITION:
        given = kwargs.get("env")
        env = {**(os.environ if given is None else given), **rollout.environment}
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        if "traceparent" in carrier:
            env["TRACEPARENT"] = carrier["traceparent"]
        kwargs = kwargs | {"env": env}
    wrapped(*args, **kwargs)
