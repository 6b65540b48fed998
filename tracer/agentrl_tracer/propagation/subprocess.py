"""Give subprocesses their rollout's environment, and send the spans of multiprocessing children."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import chosen
from agentrl_tracer.import_hooks import on_import

logger = logging.getLogger("agentrl")

_ENV_POSITION = 10  # of ``env`` among Popen's positional arguments


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
        def in_child(_: Any) -> None:
            util.Finalize(None, last_flush, exitpriority=0)

        util.register_after_fork(last_flush, in_child)

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
