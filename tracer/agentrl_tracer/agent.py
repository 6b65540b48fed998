"""The agent's side of tracing: a provider that ships spans to the gateway, and its flush.

Lives in the agent's process, so it imports OpenTelemetry and nothing else, and reads all it needs
from the environment that the runner sets. Outside a rollout there is no provider and every function
here does nothing.

Spans are batched with a short delay: exporting one at a time costs thirty times as much. Batches
are lost when a process dies by signal or ``os._exit``, so whoever ends the rollout calls ``flush``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

logger = logging.getLogger("agentrl")

_BATCH_DELAY_MS = 500
_EXPORT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Which rollout this process is, as its environment says."""

    rollout_id: str
    attempt_id: str
    gateway: str
    key: str


def current_rollout() -> RolloutContext | None:
    """The rollout this process runs; None outside training."""
    env = os.environ
    rollout_id, gateway = env.get("AGENTRL_ROLLOUT_ID"), env.get("AGENTRL_GATEWAY")
    if not rollout_id or not gateway:
        return None
    return RolloutContext(
        rollout_id, env.get("AGENTRL_ATTEMPT_ID", ""), gateway, env.get("AGENTRL_KEY", "")
    )


class _CountingExporter(SpanExporter):
    """Passes spans on and counts those that did not arrive: none may be lost silently."""

    def __init__(self) -> None:
        self._inner: SpanExporter | None = None
        self.undelivered = 0

    def send_to(self, inner: SpanExporter) -> None:
        self._inner, self.undelivered = inner, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self._inner is not None
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.undelivered += len(spans)
        return result

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner is None or self._inner.force_flush(timeout_millis)


class RolloutTracing:
    """A provider of our own, apart from whatever the application uses.

    It serves one rollout at a time; a process that runs several in turn points it at the next.
    """

    def __init__(self, rollout: RolloutContext) -> None:
        self._exporter = _CountingExporter()
        self._processor = BatchSpanProcessor(
            self._exporter, schedule_delay_millis=_BATCH_DELAY_MS, max_queue_size=65536
        )
        # A plain Resource: Resource.create scans every installed package for detectors.
        resource = Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl-agent")})
        self.provider = TracerProvider(resource=resource)
        self.provider.add_span_processor(self._processor)
        self.tracer = self.provider.get_tracer("agentrl")
        # Whether somebody flushes before the rollout counts as ended: then no reward need wait.
        self.attended = False
        self.serve(rollout)

    def serve(self, rollout: RolloutContext) -> None:
        """Spans that end from now on belong to ``rollout``."""
        import requests  # only once there is a rollout: it is slow

        self.rollout = rollout
        session = requests.Session()
        # Without a look at ~/.netrc, whose password would replace our key, nor at proxies, which
        # the runner excludes anyway. With TLS the environment may name the authority to trust.
        session.trust_env = rollout.gateway.startswith("https:")
        self._exporter.send_to(
            OTLPSpanExporter(
                endpoint=f"{rollout.gateway}/rollouts/{rollout.rollout_id}/v1/traces",
                headers={"authorization": f"Bearer {rollout.key}"},
                timeout=_EXPORT_TIMEOUT_S,
                session=session,
            )
        )

    def parent(self) -> Context | None:
        """The context new spans hang under: the current span's, else the runner's TRACEPARENT."""
        if trace.get_current_span().get_span_context().is_valid:
            return None  # OpenTelemetry's own default
        carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
        return TraceContextTextMapPropagator().extract(carrier)

    def install_globally(self) -> None:
        """Lets instrumentations see us: as the global provider, or as a guest of the application's.

        Call it after the user's module is imported: a provider of theirs set later would be
        refused by OpenTelemetry if ours were there first.
        """
        existing = trace.get_tracer_provider()
        if existing is self.provider:
            return
        if isinstance(existing, TracerProvider):
            existing.add_span_processor(self._processor)
        else:
            trace.set_tracer_provider(self.provider)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Sends what is queued. False: some span never arrived."""
        flushed = self._processor.force_flush(int(timeout_s * 1000))
        return flushed and self._exporter.undelivered == 0


_lock = threading.Lock()
_active: tuple[int, RolloutTracing] | None = None  # with the pid: a forked child makes its own


def rollout_tracing() -> RolloutTracing | None:
    """This process's tracing, made at the first call; None outside a rollout."""
    global _active
    rollout = current_rollout()
    if rollout is None:
        return None
    with _lock:
        if _active is None or _active[0] != os.getpid():
            _active = (os.getpid(), RolloutTracing(rollout))
        elif _active[1].rollout != rollout:
            _active[1].flush()
            _active[1].serve(rollout)
        return _active[1]


@contextmanager
def tracing(name: str, attributes: dict[str, Any] | None = None) -> Iterator[None]:
    """Runs the agent under the rollout's root span; an exception is recorded on it and goes on."""
    active = rollout_tracing()
    if active is None:
        yield
        return
    with active.tracer.start_as_current_span(name, active.parent(), attributes=attributes):
        yield


def flush(timeout_s: float = 10.0) -> bool:
    """Sends every queued span and reward; True when all have arrived, or there is no rollout."""
    if _active is None or _active[0] != os.getpid():
        return True
    return _active[1].flush(timeout_s)
