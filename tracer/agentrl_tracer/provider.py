"""The agent's side of tracing: a provider that ships spans to the gateway, and its flush.

Lives in the agent's process, so it imports OpenTelemetry and nothing else, and reads all it needs
from the environment that the runner sets (or, where rollouts share a process, from the context).
Outside a rollout there is no provider and every function here does nothing.

Spans are batched with a short delay: exporting one at a time costs thirty times as much. Batches
are lost when a process dies by signal or ``os._exit``, so whoever ends the rollout calls
``finish``.
"""

from __future__ import annotations

import logging
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
from agentrl_tracer.shared_provider import GuestProvider, set_globally

logger = logging.getLogger("agentrl")

_BATCH_DELAY_MS = 500
_BATCH_SPANS = 512
_EXPORT_TIMEOUT_S = 10
_DEEPEST_TREE = 64  # how far up the agent's name is looked for


@dataclass(slots=True)
class _Ledger:
    """What a rollout's spans have come to: all that ended must have arrived."""

    exporter: OTLPSpanExporter
    root: trace.SpanContext | None = None
    ended: int = 0
    arrived: int = 0
    rewarded: bool = False
    # Whether somebody flushes before the rollout counts as ended: then no reward need wait.
    attended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        return self.arrived == self.ended


class RolloutTracing:
    """A provider of our own, apart from whatever the application uses.

    It serves all rollouts of the process, one after another or at once: each span goes to the one
    whose trace it is in, else to the one whose context it was started in.
    """

    def __init__(self) -> None:
        self._routing = _Routing()
        # A plain Resource: Resource.create scans every installed package for detectors.
        resource = Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl-agent")})
        # Every span counts here, whatever share the application's OTEL_TRACES_SAMPLER asks for.
        self.provider = GuestProvider(sampler=ALWAYS_ON, resource=resource)
        self.provider.add_span_processor(self._routing)
        self.tracer = self.provider.own_tracer("agentrl")

    def parent(self) -> Context | None:
        """The context of new spans: the current span, else the rollout's root or TRACEPARENT."""
        if trace.get_current_span().get_span_context().is_valid:
            return None  # OpenTelemetry's own default
        rollout = current_rollout()
        root = None if rollout is None else self._routing.ledger(rollout).root
        if root is not None:
            return trace.set_span_in_context(trace.NonRecordingSpan(root))
        carrier = {"traceparent": os.environ.get("TRACEPARENT", "")}
        return TraceContextTextMapPropagator().extract(carrier)

    def agent_name(self) -> str | None:
        """The name of the agent that the current span works for."""
        return self._routing.agent_name(trace.get_current_span())

    @contextmanager
    def rooted(self, name: str, attributes: dict[str, Any] | None) -> Iterator[None]:
        rollout = current_rollout()
        assert rollout is not None
        with self.tracer.start_as_current_span(name, self.parent(), attributes=attributes) as span:
            self._routing.register(span.get_span_context(), rollout)
            yield

    def install_globally(self) -> None:
        """Lets instrumentations see us: as the global provider, or as a guest of the application's.

        An application that sets its provider later, over ours, is heard too, see ``guest``.
        """
        set_globally(self.provider, self._routing)

    def attend(self, rollout: RolloutContext) -> None:
        """Somebody will call ``finish`` for it: rewards need not wait until they have arrived."""
        self._routing.ledger(rollout).attended = True

    def attended(self, rollout: RolloutContext) -> bool:
        return self._routing.ledger(rollout).attended

    def rewarded(self, rollout: RolloutContext) -> bool:
        """Whether a reward was emitted in this process."""
        return self._routing.ledger(rollout).rewarded

    def flush(self, rollout: RolloutContext) -> bool:
        """Sends what is queued. False: some span of the rollout never arrived."""
        self._routing.batch.force_flush()
        return self._routing.ledger(rollout).complete

    def finish(self, rollout: RolloutContext) -> bool:
        """The last flush of a rollout: spans still open are ended, and marked as such."""
        if "crewai" in sys.modules:
            from agentrl_tracer.instrumentation.crewai import flush_events

            flush_events()
        self._routing.end_open(rollout)
        arrived = self.flush(rollout)
        self._routing.forget(rollout)
        return arrived

    def close(self) -> None:
        """For tests: ends the threads."""
        self._routing.batch.shutdown()


@dataclass(frozen=True, slots=True)
class _Open:
    span: Span
    parent: int | None
    rollout: RolloutContext


class _Routing(SpanProcessor):
    """Knows whose each span is; sits in our provider and, as a guest, in the application's."""

    def __init__(self) -> None:
        self._ledgers: dict[str, tuple[RolloutContext, _Ledger]] = {}  # by attempt
        self._traces: dict[int, RolloutContext] = {}
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self.unattributed = 0
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _start(self) -> None:
        self.batch = BatchSpanProcessor(
            _Exporter(self),
            schedule_delay_millis=_BATCH_DELAY_MS,
            max_queue_size=65536,
            max_export_batch_size=_BATCH_SPANS,
        )
        # Of spans that are queued: by id, since the processor hands on another object.
        self.owners: dict[int, RolloutContext] = {}

    def _forked(self) -> None:
        """The parent sends what is the parent's; and its connections are not ours to use."""
        self._lock = threading.Lock()
        self._ledgers = {}
        self._open = {}
        self.owners = {}

    def ledger(self, rollout: RolloutContext) -> _Ledger:
        with self._lock:
            known = self._ledgers.get(rollout.attempt_id)
            if known is None:
                known = (rollout, _Ledger(_exporter(rollout)))
                self._ledgers[rollout.attempt_id] = known
            return known[1]

    def register(self, root: trace.SpanContext, rollout: RolloutContext) -> None:
        with self._lock:
            self._traces[root.trace_id] = rollout
        self.ledger(rollout).root = root

    def forget(self, rollout: RolloutContext) -> None:
        """Spans that still come later go to its (sealed) attempt, and are refused there."""
        with self._lock:
            for trace_id in [t for t, r in self._traces.items() if r == rollout]:
                del self._traces[trace_id]
            self._ledgers.pop(rollout.attempt_id, None)

    def end_open(self, rollout: RolloutContext) -> None:
        for opened in list(self._open.values()):
            if opened.rollout == rollout:
                opened.span.set_attribute(UNFINISHED, True)
                opened.span.end()

    def agent_name(self, span: trace.Span) -> str | None:
        here: int | None = span.get_span_context().span_id
        for _ in range(_DEEPEST_TREE):
            opened = None if here is None else self._open.get(here)
            if opened is None:
                return None
            name = (opened.span.attributes or {}).get(AGENT_NAME)
            if isinstance(name, str) and name:
                return name
            here = opened.parent
        return None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        context = span.get_span_context()
        rollout = (context and self._traces.get(context.trace_id)) or current_rollout()
        if rollout is None or context is None:
            self.unattributed += 1
            return
        parent = None if span.parent is None else span.parent.span_id
        self._open[context.span_id] = _Open(span, parent, rollout)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        opened = context and self._open.pop(context.span_id, None)
        if not opened or context is None:
            return
        ledger = self.ledger(opened.rollout)
        with ledger.lock:
            ledger.ended += 1
            ledger.rewarded = ledger.rewarded or span.name == REWARD_SPAN
        self.owners[context.span_id] = opened.rollout
        self.batch.on_end(span)

    def shutdown(self) -> None:
        """An application shuts its provider down when it likes; rollouts go on."""
        self.batch.force_flush()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self.batch.force_flush(timeout_millis)


class _Exporter(SpanExporter):
    """Sends each rollout's spans with its own key, and counts what arrives."""

    def __init__(self, routing: _Routing) -> None:
        self._routing = routing

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        mine: dict[RolloutContext, list[ReadableSpan]] = {}
        for span in spans:
            context = span.get_span_context()
            owner = context and self._routing.owners.pop(context.span_id, None)
            if owner:
                mine.setdefault(owner, []).append(span)
        outcome = SpanExportResult.SUCCESS
        for rollout, theirs in mine.items():
            ledger = self._routing.ledger(rollout)
            result = ledger.exporter.export(theirs)
            if result is SpanExportResult.SUCCESS:
                with ledger.lock:
                    ledger.arrived += len(theirs)
            else:
                outcome = result
        return outcome

    def shutdown(self) -> None:
        pass


def _exporter(rollout: RolloutContext) -> OTLPSpanExporter:
    import requests  # only once there is a rollout: it is slow

    session = requests.Session()
    # Without a look at ~/.netrc, whose password would replace our key, nor at proxies, which
    # the runner excludes anyway. With TLS the environment may name the authority to trust.
    session.trust_env = rollout.gateway.startswith("https:")
    return OTLPSpanExporter(
        endpoint=f"{rollout.gateway}/rollouts/{rollout.rollout_id}/v1/traces",
        # The second one keeps our own hooks from marking the request as somebody else's.
        headers={"authorization": f"Bearer {rollout.key}", ROLLOUT_HEADER: rollout.key},
        timeout=_EXPORT_TIMEOUT_S,
        session=session,
    )


_lock = threading.Lock()
_active: RolloutTracing | None = None


def rollout_tracing() -> RolloutTracing | None:
    """This process's tracing, made at the first call; None outside a rollout."""
    global _active
    if current_rollout() is None:
        return None
    with _lock:
        if _active is None:
            _active = RolloutTracing()
            from agentrl_tracer.propagation.hooks import install_hooks

            install_hooks(_active)
        return _active


@contextmanager
def tracing(name: str, attributes: dict[str, Any] | None = None) -> Iterator[None]:
    """Runs the agent under the rollout's root span; an exception is recorded on it and goes on."""
    active = rollout_tracing()
    if active is None:
        yield
        return
    with active.rooted(name, attributes):
        yield


def flush() -> bool:
    """Sends every queued span and reward; True when all have arrived, or there is no rollout."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.flush(rollout)


def finish() -> bool:
    """The rollout is over: sends everything. False: it is incomplete."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.finish(rollout)
