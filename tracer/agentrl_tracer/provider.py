"""Provide spans through our own TracerProvider, beside the application's if it has one.

OpenTelemetry's global provider can be set once. When ours is set first and the application sets
its own later, ours hands over: tracers taken from it delegate to the application's provider, and
our span processor joins that provider. Either way both sides get every span.
"""

from __future__ import annotations

# Before any TracerProvider: each registers a hook for forked processes that uses a thread pool, and
# deadlocks in them unless the pool's own hook was registered first.
import concurrent.futures.thread  # noqa: F401
import functools
import os
import secrets
import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

LONGEST_ATTRIBUTE = 1_000_000
"""Characters, of at most 4 bytes each."""
_MOST_ATTRIBUTES = 128

_lock = threading.Lock()


def _make_ids_unique() -> None:
    """Keep ids unique in this process when the agent seeds Python's ``random``, their source.

    Rollouts of one task may seed it alike, and ids tell their spans and rewards apart. Tracers that
    an application has taken hold generators already, so the class is changed.
    """
    RandomIdGenerator.generate_span_id = lambda self: secrets.randbits(64) or 1
    RandomIdGenerator.generate_trace_id = lambda self: secrets.randbits(128) or 1


class RolloutTracerProvider(TracerProvider):
    """A provider that delegates to its ``successor`` once it has one.

    Args:
        processor: gets the spans of both.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        # A plain Resource: Resource.create scans every installed package for detectors.
        resource = Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl-agent")})
        # ALWAYS_ON: the application's OTEL_TRACES_SAMPLER must not drop rewards.
        super().__init__(
            sampler=ALWAYS_ON,
            resource=resource,
            # All of them: what is left out is read from OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and others.
            span_limits=SpanLimits(
                max_attributes=_MOST_ATTRIBUTES,
                max_span_attributes=_MOST_ATTRIBUTES,
                max_event_attributes=_MOST_ATTRIBUTES,
                max_attribute_length=LONGEST_ATTRIBUTE,
                max_span_attribute_length=LONGEST_ATTRIBUTE,
            ),
        )
        self._disabled = False  # OTEL_SDK_DISABLED, which an agent may set itself, neither
        _make_ids_unique()
        self.successor: TracerProvider | None = None
        self._processor = processor
        self.add_span_processor(processor)

    def install_globally(self) -> None:
        """Become the global provider, or join the one that is already set."""
        with _lock:
            existing = trace.get_tracer_provider()
            if existing is self or self.successor is existing:
                return
            if isinstance(existing, TracerProvider):
                self._hand_over(existing)
                return
            trace.set_tracer_provider(self)
            # The function behind the public one, which modules may have imported by name.
            original = trace._set_tracer_provider

            def set_tracer_provider(tracer_provider: trace.TracerProvider, log: bool) -> None:
                in_charge = trace.get_tracer_provider() is self and self.successor is None
                if not in_charge or not isinstance(tracer_provider, TracerProvider):
                    original(tracer_provider, log)  # warns that a provider is set already
                elif tracer_provider is not self:
                    self._hand_over(tracer_provider)

            trace._set_tracer_provider = set_tracer_provider

    def _hand_over(self, theirs: TracerProvider) -> None:
        theirs.add_span_processor(self._processor)
        self.successor = theirs

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return _DelegatingTracer(self, args, kwargs)

    def own_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """Return a tracer of this provider itself, whatever the successor is."""
        return super().get_tracer(*args, **kwargs)

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        if self.successor is None:
            super().add_span_processor(span_processor)
        else:
            self.successor.add_span_processor(span_processor)

    def shutdown(self) -> None:
        """Flush only: an application may shut the global provider down while rollouts go on."""
        if self.successor is not None:
            self.successor.shutdown()
        self.force_flush()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        theirs = self.successor is None or self.successor.force_flush(timeout_millis)
        return super().force_flush(timeout_millis) and theirs


class _DelegatingTracer(trace.Tracer):
    """Asks at each span which provider is in charge: applications keep the tracers they take."""

    def __init__(self, provider: RolloutTracerProvider, args: Any, kwargs: Any) -> None:
        self._provider = provider
        self._own = provider.own_tracer(*args, **kwargs)
        self._of = functools.cache(lambda successor: successor.get_tracer(*args, **kwargs))

    def _tracer(self) -> trace.Tracer:
        successor = self._provider.successor
        return self._own if successor is None else self._of(successor)

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._tracer().start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer().start_as_current_span(*args, **kwargs)
