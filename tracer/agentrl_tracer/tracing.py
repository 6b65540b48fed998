"""Trace the agent's process: root spans, attribution to attempts, and the final flush.

Outside a rollout nothing is installed and every function returns at once.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import RolloutContext, chosen, current_rollout
from agentrl_tracer.instrumentation.crewai import flush_events
from agentrl_tracer.instrumentation.registry import instrument_frameworks
from agentrl_tracer.propagation.http import mark_requests
from agentrl_tracer.propagation.subprocess import carry_into_subprocesses
from agentrl_tracer.propagation.threads import carry_into_threads
from agentrl_tracer.provider import RolloutTracerProvider, install_globally
from agentrl_tracer.span_router import SpanRouter

logger = logging.getLogger("agentrl")


class RolloutTracing:
    """The process's provider and its router, for all rollouts of the process."""

    def __init__(self) -> None:
        self._router = SpanRouter()
        # A plain Resource: Resource.create scans every installed package for detectors.
        resource = Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl-agent")})
        # ALWAYS_ON: the application's OTEL_TRACES_SAMPLER must not drop rewards.
        self.provider = RolloutTracerProvider(sampler=ALWAYS_ON, resource=resource)
        self.provider.add_span_processor(self._router)
        self.tracer = self.provider.own_tracer("agentrl")

    def parent(self) -> Context | None:
        """Return a new span's context: the current span, the rollout's root, or TRACEPARENT."""
        if trace.get_current_span().get_span_context().is_valid:
            return None  # OpenTelemetry's default
        rollout = current_rollout()
        root = None if rollout is None else self._router.attempt(rollout).root
        if root is not None:
            return trace.set_span_in_context(trace.NonRecordingSpan(root))
        carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
        return TraceContextTextMapPropagator().extract(carrier)

    def agent_name(self) -> str | None:
        """Return the name of the agent that the current span works for."""
        return self._router.agent_name(trace.get_current_span())

    @contextmanager
    def root_span(
        self, rollout: RolloutContext, name: str, attributes: dict[str, Any] | None
    ) -> Iterator[None]:
        with self.tracer.start_as_current_span(name, self.parent(), attributes=attributes) as span:
            self._router.set_root(span.get_span_context(), rollout)
            yield

    def install_globally(self) -> None:
        """Receive the spans of all instrumentations, beside the application's own provider."""
        install_globally(self.provider, self._router)

    def expect_finish(self, rollout: RolloutContext) -> None:
        """Let rewards leave in the background: ``finish`` will be called for the rollout."""
        self._router.attempt(rollout).finish_expected = True

    def finish_expected(self, rollout: RolloutContext) -> bool:
        return self._router.attempt(rollout).finish_expected

    def rewarded(self, rollout: RolloutContext) -> bool:
        """Whether the agent has emitted a reward in this process."""
        return self._router.attempt(rollout).rewarded

    def flush(self, rollout: RolloutContext) -> bool:
        """Send queued spans. False: some span of the rollout did not arrive."""
        self._router.force_flush()
        return self._router.attempt(rollout).complete

    def finish(self, rollout: RolloutContext) -> bool:
        """End the rollout's open spans and send everything. False: some span did not arrive."""
        if "crewai" in sys.modules:
            flush_events()
        self._router.end_open_spans(rollout)
        arrived = self.flush(rollout)
        self._router.forget(rollout)
        return arrived

    def close(self) -> None:
        """End the exporting thread."""
        self._router.close()


_lock = threading.Lock()
_active: RolloutTracing | None = None


def rollout_tracing() -> RolloutTracing | None:
    """Return this process's tracing, created at the first call; None outside a rollout."""
    global _active
    if current_rollout() is None:
        return None
    with _lock:
        if _active is None:
            _active = RolloutTracing()
            _install_patches()
        return _active


@functools.cache
def _install_patches() -> None:
    """Patch HTTP clients, threads, subprocesses and frameworks, once per process."""
    carry_into_threads()
    carry_into_subprocesses(flush)
    mark_requests(lambda: _active.agent_name() if _active is not None else None)
    instrument_frameworks(lambda: _active.parent() if _active is not None else None)


@contextmanager
def tracing(name: str, attributes: dict[str, Any] | None = None) -> Iterator[None]:
    """Run the agent under its rollout's root span, which records an exception that passes."""
    active, rollout = rollout_tracing(), current_rollout()
    if active is None or rollout is None:
        yield
        return
    with active.root_span(rollout, name, attributes):
        yield


def flush() -> bool:
    """Send the rollout's queued spans and rewards; True if all arrived or there is no rollout."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.flush(rollout)


def finish() -> bool:
    """End the rollout and send everything; False if some span or reward did not arrive."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.finish(rollout)


@dataclass(frozen=True, slots=True)
class Attribution:
    """An attempt that shares its process with others."""

    rollout: RolloutContext
    _tracing: RolloutTracing

    @property
    def rewarded(self) -> bool:
        """Whether the agent has emitted a reward in this process."""
        return self._tracing.rewarded(self.rollout)

    def finish(self) -> bool:
        """End the attempt and send everything; blocks, so call it in a thread from an event loop.

        Returns:
            False when some span or reward did not arrive: the attempt is incomplete.
        """
        return self._tracing.finish(self.rollout)


@contextmanager
def attributed(
    key: str,
    rollout_id: str,
    attempt_id: str,
    *,
    gateway: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Attribution]:
    """Attribute what runs inside, threads and subprocesses included, to one attempt.

    Enter it in the attempt's own task or thread, run the agent inside, and call ``finish`` before
    the attempt ends. Calls to the gateway then carry the attempt's key, whatever base URL and key
    their client has. Set the process's ``OPENAI_BASE_URL`` to the gateway's ``/v1`` and its
    ``OPENAI_API_KEY`` to an invalid key: a call that escapes is then refused, not misattributed.

    Args:
        gateway: base URL without ``/v1``; ``AGENTRL_GATEWAY`` by default.
        environment: variables that the attempt's subprocesses get.

    Raises:
        ValueError: no gateway is known.
    """
    gateway = gateway or os.environ.get("AGENTRL_GATEWAY")
    if not gateway:
        raise ValueError("attributed: pass gateway=, or set AGENTRL_GATEWAY")
    rollout = RolloutContext(rollout_id, attempt_id, gateway.rstrip("/"), key, environment or {})
    token = chosen.set(rollout)
    try:
        active = rollout_tracing()
        assert active is not None
        active.expect_finish(rollout)
        yield Attribution(rollout, active)
    finally:
        chosen.reset(token)
