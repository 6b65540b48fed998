"""Our provider beside an application's own: whichever comes first, both get every span.

Knows OpenTelemetry's global provider, which can be set once. Ours may be set first; then an
application that sets its own would be refused, and its exporters would starve. So ours gives way:
tracers taken from it hand on to the application's provider as soon as there is one, and our
processor moves in there as a guest.
"""

from __future__ import annotations

import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


class GuestProvider(TracerProvider):
    """A provider that gives way to a successor."""

    successor: TracerProvider | None = None

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return _Tracer(self, args, kwargs)

    def own_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """A tracer of this provider itself, whoever succeeds it."""
        return super().get_tracer(*args, **kwargs)

    def current_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        chosen = self.successor
        return self.own_tracer(*args, **kwargs) if chosen is None else chosen.get_tracer(
            *args, **kwargs
        )  # fmt: skip

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        if self.successor is None:
            super().add_span_processor(span_processor)
        else:
            self.successor.add_span_processor(span_processor)

    def shutdown(self) -> None:
        """Whoever asks for the global provider may shut it down; rollouts go on."""
        if self.successor is not None:
            self.successor.shutdown()
        self.force_flush()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        theirs = self.successor is None or self.successor.force_flush(timeout_millis)
        return super().force_flush(timeout_millis) and theirs


class _Tracer(trace.Tracer):
    """Applications take tracers early and keep them: this one asks each time who is in charge."""

    def __init__(self, provider: GuestProvider, args: Any, kwargs: Any) -> None:
        self._provider = provider
        self._args, self._kwargs = args, kwargs
        self._found: tuple[TracerProvider | None, trace.Tracer] | None = None

    def _tracer(self) -> trace.Tracer:
        found = self._found
        if found is None or found[0] is not self._provider.successor:
            successor = self._provider.successor
            found = (successor, self._provider.current_tracer(*self._args, **self._kwargs))
            self._found = found
        return found[1]

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._tracer().start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer().start_as_current_span(*args, **kwargs)


_lock = threading.Lock()


def set_globally(ours: GuestProvider, routing: SpanProcessor) -> None:
    """Makes ``ours`` the global provider, or ``routing`` a guest of the one that is there."""
    with _lock:
        existing = trace.get_tracer_provider()
        if existing is ours or ours.successor is existing:
            return
        if isinstance(existing, TracerProvider):
            _move_in(ours, existing, routing)
            return
        trace.set_tracer_provider(ours)
        original = trace.set_tracer_provider

        def set_tracer_provider(tracer_provider: trace.TracerProvider) -> None:
            free = trace.get_tracer_provider() is ours and ours.successor is None
            if free and isinstance(tracer_provider, TracerProvider):
                if tracer_provider is not ours:
                    _move_in(ours, tracer_provider, routing)
            else:
                original(tracer_provider)  # which says that there is one already

        trace.set_tracer_provider = set_tracer_provider


def _move_in(ours: GuestProvider, theirs: TracerProvider, routing: SpanProcessor) -> None:
    theirs.add_span_processor(routing)
    ours.successor = theirs
