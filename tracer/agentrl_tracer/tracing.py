"""Trace the agent's process, and send each span under the key of the attempt that it belongs to.

Outside a rollout nothing is installed and every function returns at once. Spans are batched with a
short delay, which costs a thirtieth of exporting them one at a time. A batch is lost when its
process dies by a signal or ``os._exit``, so a rollout ends with a flush.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Status
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from agentrl_tracer.context import RolloutContext, chosen, current_rollout, rollout_in
from agentrl_tracer.conventions import (
    AGENT_NAME,
    REQUEST_ID,
    REWARD_SPAN,
    ROLLOUT_HEADER,
    UNDELIVERED_SPAN,
    UNFINISHED,
)
from agentrl_tracer.half_characters import encodable
from agentrl_tracer.instrumentation.crewai import flush_events
from agentrl_tracer.instrumentation.registry import instrument_frameworks
from agentrl_tracer.propagation import (
    carry_into_subprocesses,
    carry_into_threads,
    mark_requests,
)
from agentrl_tracer.provider import RolloutTracerProvider

logger = logging.getLogger("agentrl")

_lock = threading.Lock()
_active: SpanRouter | None = None
_LONGEST_STATUS = 10_000  # characters
_LARGEST_REQUEST = 2_000_000  # characters of attributes; the gateway accepts 8 MiB


def rollout_tracing() -> AttemptTracing | None:
    """Return the tracing of the running attempt; None outside a rollout."""
    global _active
    rollout = current_rollout()
    if rollout is None:
        return None
    with _lock:
        if _active is None:
            _active = SpanRouter()
            _install_patches()
        router = _active
    return router.attempt(rollout)


@functools.cache
def _install_patches() -> None:
    """Patch HTTP clients, threads, subprocesses and frameworks, once per process."""
    carry_into_threads()
    carry_into_subprocesses(flush)
    mark_requests(lambda: _active.agent_name() if _active is not None else None, _report_given_up)
    instrument_frameworks(lambda: _active.parent() if _active is not None else None)


def _report_given_up(rollout: RolloutContext, request_id: str) -> None:
    """Say in a span that a request's answer did not come through."""
    if (router := _active) is None:
        return
    attempt = router.attempt(rollout)
    # A call that is closed late, by garbage collection, may not be of the current rollout.
    root = attempt.root if current_rollout() != rollout else None
    under = None if root is None else trace.set_span_in_context(trace.NonRecordingSpan(root))
    span = router.tracer.start_span(
        UNDELIVERED_SPAN, under or router.parent(), attributes={REQUEST_ID: request_id}
    )
    span.end()


@contextmanager
def tracing(name: str, attributes: dict[str, Any] | None = None) -> Iterator[None]:
    """Run the agent under its rollout's root span, which records an exception that passes."""
    attempt = rollout_tracing()
    if attempt is None:
        yield
        return
    router = attempt.router
    with router.tracer.start_as_current_span(name, router.parent(), attributes=attributes) as span:
        attempt.root = span.get_span_context()
        router.traces[attempt.root.trace_id] = attempt.rollout
        yield


def flush() -> bool:
    """Send the rollout's queued spans and rewards; True if all arrived or there is no rollout."""
    attempt = rollout_tracing()
    return attempt is None or attempt.flush()


@contextmanager
def attributed(environment: Mapping[str, str]) -> Iterator[AttemptTracing]:
    """Attribute what runs inside, threads and subprocesses included, to one attempt.

    Enter it in the attempt's own task or thread, run the agent inside, and call ``finish`` before
    the attempt ends. Calls to the gateway then carry the attempt's key, whatever base URL and key
    their client has. Set the process's ``OPENAI_BASE_URL`` to the gateway's ``/v1`` and its
    ``OPENAI_API_KEY`` to an invalid key: a call that escapes is then refused, not misattributed.

    Args:
        environment: variables that the attempt's subprocesses get. ``AGENTRL_ROLLOUT_ID``,
            ``AGENTRL_ATTEMPT_ID``, ``AGENTRL_GATEWAY`` and ``AGENTRL_KEY`` name the attempt.
    """
    token = chosen.set(rollout_in(environment))
    try:
        attempt = rollout_tracing()
        assert attempt is not None
        attempt.finish_expected = True
        yield attempt
    finally:
        chosen.reset(token)


@dataclass(eq=False, slots=True)
class AttemptTracing:
    """One attempt's spans. The attempt is complete when all that ended have arrived."""

    router: SpanRouter
    rollout: RolloutContext
    exporter: OTLPSpanExporter
    root: trace.SpanContext | None = None
    ended: int = 0
    arrived: int = 0
    rewarded: bool = False  # a reward span has ended
    finish_expected: bool = False  # ``finish`` will be called, so a reward need not leave at once

    def flush(self) -> bool:
        """Send queued spans. False: some span of the attempt did not arrive."""
        self.router.force_flush()
        return self.arrived == self.ended

    def finish(self) -> bool:
        """End the attempt's open spans and send everything; blocks, so not on an event loop.

        The gateway refuses spans that still come, because the attempt is sealed.

        Returns:
            False when some span or reward did not arrive: the attempt is incomplete.
        """
        if "crewai" in sys.modules:
            flush_events()
        for span, owner in list(self.router.open.values()):
            if owner is self:
                span.set_attribute(UNFINISHED, True)
                span.end()
        arrived = self.flush()
        self.router.forget(self)
        return arrived


class SpanRouter(SpanProcessor):
    """The process's tracing: assigns spans to attempts, in our provider and in an application's.

    A span belongs to the rollout of its trace, else to the rollout current at its start. Spans of
    no rollout are not exported.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, AttemptTracing] = {}  # by attempt id
        self.traces: dict[int, RolloutContext] = {}  # by trace id
        self.open: dict[int | None, tuple[Span, AttemptTracing]] = {}  # by span id
        # By span id, of queued spans: the batch processor hands on another span object.
        self._owners: dict[int, AttemptTracing] = {}
        self._lock = threading.Lock()
        self.batch = BatchSpanProcessor(
            _Exporter(self._owners),
            schedule_delay_millis=500,
            max_queue_size=65536,
            max_export_batch_size=512,
        )
        provider = RolloutTracerProvider(self)
        self.tracer = provider.own_tracer("agentrl")
        self.install_globally = provider.install_globally
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset_in_child)

    def _reset_in_child(self) -> None:
        """Leave the parent's spans and connections to the parent."""
        self._lock = threading.Lock()
        for known in (self._attempts, self.open, self._owners):
            known.clear()

    def attempt(self, rollout: RolloutContext) -> AttemptTracing:
        with self._lock:
            known = self._attempts.get(rollout.attempt_id)
            if known is None:
                known = AttemptTracing(self, rollout, _exporter(rollout))
                self._attempts[rollout.attempt_id] = known
            return known

    def parent(self) -> Context | None:
        """Return a new span's context: the current span, the rollout's root, or TRACEPARENT."""
        if trace.get_current_span().get_span_context().is_valid:
            return None  # OpenTelemetry's default
        rollout = current_rollout()
        root = None if rollout is None else self.attempt(rollout).root
        if root is not None:
            return trace.set_span_in_context(trace.NonRecordingSpan(root))
        carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
        return TraceContextTextMapPropagator().extract(carrier)

    def agent_name(self) -> str | None:
        """Return the agent name of the nearest open span, from the current one up, that has one."""
        here: int | None = trace.get_current_span().get_span_context().span_id
        while opened := self.open.get(here):
            span = opened[0]
            name = (span.attributes or {}).get(AGENT_NAME)
            if isinstance(name, str) and name:
                return name
            here = None if span.parent is None else span.parent.span_id
        return None

    def forget(self, attempt: AttemptTracing) -> None:
        with self._lock:
            for trace_id in [t for t, r in list(self.traces.items()) if r == attempt.rollout]:
                del self.traces[trace_id]
            self._attempts.pop(attempt.rollout.attempt_id, None)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        context = span.get_span_context()
        rollout = (context and self.traces.get(context.trace_id)) or current_rollout()
        if rollout is not None and context is not None:
            self.open[context.span_id] = span, self.attempt(rollout)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        opened = context and self.open.pop(context.span_id, None)
        if not opened or context is None or not context.trace_flags.sampled:
            return  # what is recorded and not sampled is not exported either
        if said := span.status.description:  # of an exception, with half a character perhaps
            span._status = Status(span.status.status_code, encodable(said[:_LONGEST_STATUS]))
        span._name = encodable(span.name)
        for event in span.events:
            event._name = encodable(event.name)
        attempt = opened[1]
        with self._lock:
            attempt.ended += 1
            attempt.rewarded = attempt.rewarded or span.name == REWARD_SPAN
        self._owners[context.span_id] = attempt
        self.batch.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self.batch.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Flush only: an application may shut its provider down while rollouts go on."""
        self.force_flush()


class _Exporter(SpanExporter):
    """Sends each attempt's spans with its own key, and counts those that arrive."""

    def __init__(self, owners: dict[int, AttemptTracing]) -> None:
        self._owners = owners

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        by_attempt: dict[AttemptTracing, list[ReadableSpan]] = {}
        for span in spans:
            context = span.get_span_context()
            owner = context and self._owners.pop(context.span_id, None)
            if owner:
                by_attempt.setdefault(owner, []).append(span)
        for attempt, its_spans in by_attempt.items():
            for request in _requests(its_spans):
                if attempt.exporter.export(request) is SpanExportResult.SUCCESS:
                    attempt.arrived += len(request)
        return SpanExportResult.SUCCESS  # of no use to the batch processor


def _requests(spans: list[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    """Divide spans into requests that the gateway does not refuse as too large."""
    request: list[ReadableSpan] = []
    length = 0
    for span in spans:
        size = sum(map(_length, _values(span)))
        if size > _LARGEST_REQUEST:  # of an application's provider; ours has a limit
            span, size = _shortened(span), _LARGEST_REQUEST
        if request and length + size > _LARGEST_REQUEST:
            yield request
            request, length = [], 0
        request.append(span)
        length += size
    yield request


def _values(span: ReadableSpan) -> list[Any]:
    held = [span.attributes, *(event.attributes for event in span.events)]
    return [value for attributes in held for value in (attributes or {}).values()]


def _length(value: Any) -> int:
    return len(str(value))


def _shortened(span: ReadableSpan) -> ReadableSpan:
    """Return a span whose long values are cut, each to its share of what a request takes."""
    most = max(_LARGEST_REQUEST // len(_values(span)) - 100, 0)

    def cut(attributes: Attributes) -> Attributes:
        return {
            name: value
            if (length := _length(value)) <= most
            else f"{str(value)[:most]} [agentrl cut {length - most} of {length} characters]"
            for name, value in (attributes or {}).items()
        }

    shortened = copy.copy(span)
    shortened._attributes = cut(span.attributes)
    shortened._events = [
        Event(event.name, cut(event.attributes), event.timestamp) for event in span.events
    ]
    return shortened


def _exporter(rollout: RolloutContext) -> OTLPSpanExporter:
    import requests  # slow, so only once there is a rollout

    session = requests.Session()
    # No ~/.netrc, whose password would replace the key, and no proxies. With TLS the environment
    # may name the certificate authority to trust.
    session.trust_env = rollout.gateway.startswith("https:")
    return OTLPSpanExporter(
        endpoint=f"{rollout.gateway}/rollouts/{rollout.rollout_id}/v1/traces",
        # The rollout header keeps our own HTTP patches from marking this request.
        headers={"authorization": f"Bearer {rollout.key}", ROLLOUT_HEADER: rollout.key},
        timeout=10,
        session=session,
    )
