"""Send each span to the gateway under the key of the attempt that it belongs to.

Spans are batched with a short delay, which costs a thirtieth of exporting them one at a time. A
batch is lost when its process dies by a signal or ``os._exit``, so a rollout ends with a flush.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl_tracer.context import RolloutContext, current_rollout
from agentrl_tracer.conventions import AGENT_NAME, REWARD_SPAN, ROLLOUT_HEADER, UNFINISHED
from agentrl_tracer.instrumentation.crewai import flush_events
from agentrl_tracer.provider import RolloutTracerProvider, install_globally

_MAX_DEPTH = 64  # ancestors searched for an agent's name


@dataclass(slots=True)
class AttemptSpans:
    """Counts of one attempt's spans. The attempt is complete when all that ended have arrived."""

    exporter: OTLPSpanExporter
    root: trace.SpanContext | None = None
    ended: int = 0
    arrived: int = 0
    rewarded: bool = False  # a reward span has ended
    finish_expected: bool = False  # ``finish`` will be called, so a reward need not leave at once
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _OpenSpan:
    span: Span
    parent: int | None
    rollout: RolloutContext


class SpanRouter(SpanProcessor):
    """The process's tracing: assigns spans to attempts, in our provider and in an application's.

    A span belongs to the rollout of its trace, else to the rollout current at its start. Spans of
    no rollout are not exported.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, AttemptSpans] = {}  # by attempt id
        self._traces: dict[int, RolloutContext] = {}  # by trace id
        self._open: dict[int, _OpenSpan] = {}  # by span id
        # By span id, of queued spans: the batch processor hands on another span object.
        self.owners: dict[int, RolloutContext] = {}
        self._lock = threading.Lock()
        self._batch = BatchSpanProcessor(
            _Exporter(self),
            schedule_delay_millis=500,
            max_queue_size=65536,
            max_export_batch_size=512,
        )
        # A plain Resource: Resource.create scans every installed package for detectors.
        resource = Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl-agent")})
        # ALWAYS_ON: the application's OTEL_TRACES_SAMPLER must not drop rewards.
        self._provider = RolloutTracerProvider(sampler=ALWAYS_ON, resource=resource)
        self._provider.add_span_processor(self)
        self.tracer = self._provider.own_tracer("agentrl")
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset_in_child)

    def _reset_in_child(self) -> None:
        """Leave the parent's spans and connections to the parent."""
        self._lock = threading.Lock()
        self._attempts, self._open, self.owners = {}, {}, {}

    def install_globally(self) -> None:
        """Receive the spans of all instrumentations, beside the application's own provider."""
        install_globally(self._provider, self)

    def attempt(self, rollout: RolloutContext) -> AttemptSpans:
        with self._lock:
            known = self._attempts.get(rollout.attempt_id)
            if known is None:
                known = self._attempts[rollout.attempt_id] = AttemptSpans(_exporter(rollout))
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

    @contextmanager
    def root_span(
        self, rollout: RolloutContext, name: str, attributes: dict[str, Any] | None
    ) -> Iterator[None]:
        with self.tracer.start_as_current_span(name, self.parent(), attributes=attributes) as span:
            root = span.get_span_context()
            with self._lock:
                self._traces[root.trace_id] = rollout
            self.attempt(rollout).root = root
            yield

    def agent_name(self) -> str | None:
        """Return the agent name of the nearest open span, from the current one up, that has one."""
        here: int | None = trace.get_current_span().get_span_context().span_id
        for _ in range(_MAX_DEPTH):
            opened = None if here is None else self._open.get(here)
            if opened is None:
                return None
            name = (opened.span.attributes or {}).get(AGENT_NAME)
            if isinstance(name, str) and name:
                return name
            here = opened.parent
        return None

    def flush(self, rollout: RolloutContext) -> bool:
        """Send queued spans. False: some span of the rollout did not arrive."""
        self.force_flush()
        attempt = self.attempt(rollout)
        return attempt.arrived == attempt.ended

    def finish(self, rollout: RolloutContext) -> bool:
        """End the rollout's open spans and send everything. False: some span did not arrive.

        The gateway refuses spans that still come, because the attempt is sealed.
        """
        if "crewai" in sys.modules:
            flush_events()
        for opened in list(self._open.values()):
            if opened.rollout == rollout:
                opened.span.set_attribute(UNFINISHED, True)
                opened.span.end()
        arrived = self.flush(rollout)
        with self._lock:
            for trace_id in [t for t, r in self._traces.items() if r == rollout]:
                del self._traces[trace_id]
            self._attempts.pop(rollout.attempt_id, None)
        return arrived

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        context = span.get_span_context()
        rollout = (context and self._traces.get(context.trace_id)) or current_rollout()
        if rollout is not None and context is not None:
            parent = None if span.parent is None else span.parent.span_id
            self._open[context.span_id] = _OpenSpan(span, parent, rollout)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        opened = context and self._open.pop(context.span_id, None)
        if not opened or context is None:
            return
        attempt = self.attempt(opened.rollout)
        with attempt.lock:
            attempt.ended += 1
            attempt.rewarded = attempt.rewarded or span.name == REWARD_SPAN
        self.owners[context.span_id] = opened.rollout
        self._batch.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batch.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Flush only: an application may shut its provider down while rollouts go on."""
        self.force_flush()

    def close(self) -> None:
        """End the batch processor's thread."""
        self._batch.shutdown()


class _Exporter(SpanExporter):
    def __init__(self, router: SpanRouter) -> None:
        self._router = router

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send each attempt's spans with its own key, and count those that arrive."""
        by_rollout: dict[RolloutContext, list[ReadableSpan]] = {}
        for span in spans:
            context = span.get_span_context()
            owner = context and self._router.owners.pop(context.span_id, None)
            if owner:
                by_rollout.setdefault(owner, []).append(span)
        outcome = SpanExportResult.SUCCESS
        for rollout, its_spans in by_rollout.items():
            attempt = self._router.attempt(rollout)
            result = attempt.exporter.export(its_spans)
            if result is SpanExportResult.SUCCESS:
                with attempt.lock:
                    attempt.arrived += len(its_spans)
            else:
                outcome = result
        return outcome


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
