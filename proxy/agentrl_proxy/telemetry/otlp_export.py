"""Export what is recorded to an OTLP backend too: Jaeger, Phoenix, Langfuse, a collector.

A slow or absent backend delays nothing; spans that it does not get are counted. Spans leave as they
came. Calls, and rewards of agents without OpenTelemetry, leave as spans of the gateway.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from agentrl_proxy.dependencies import TraceSink
from agentrl_tracer.conventions import (
    AGENT_NAME,
    EVALUATION_EXPLANATION,
    EVALUATION_NAME,
    EVALUATION_VALUE,
    RESPONSE_ID,
    REWARD_SPAN,
)
from agentrl_tracer.schemas import AttemptState, Call, CallState, Reward, Span

log = logging.getLogger("agentrl.proxy")

_MAX_QUEUED = 20_000  # spans
_MAX_BATCH = 1_000
_TIMEOUT_S = 10.0  # of one batch, with OpenTelemetry's retries of failures that may pass
_CLOSE_S = 5.0
_RESOURCE = {"service.name": "agentrl-gateway"}


class OtlpExporter:
    """Sends spans to a backend from a thread of its own.

    Args:
        endpoint: the backend's base URL; ``/v1/traces`` is added if it is missing.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str] | None = None) -> None:
        # Imported here: a gateway without a backend saves the memory.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.url = f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
        self.sent = 0
        self.lost = 0
        self._exporter = OTLPSpanExporter(self.url, headers=headers, timeout=_TIMEOUT_S)
        self._queue: queue.Queue[Span] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-export", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        return {"sent": self.sent, "lost": self.lost, "queued": self._queue.qsize()}

    def put(self, spans: Sequence[Span]) -> None:
        """Queue spans; never waits."""
        for span in spans:
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self.lost += 1

    def close(self) -> None:
        """Send what is possible within a few seconds; the rest is counted as lost."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # ends a retry's pause
        self.lost += len(self._take(_MAX_QUEUED, 0.0))

    def _run(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        from agentrl_tracer.otlp_codec import readable_span

        while (spans := self._take(_MAX_BATCH, 0.2)) or not self._closing.is_set():
            if not spans:
                continue
            result = None
            try:
                result = self._exporter.export([readable_span(span) for span in spans])
            except Exception:  # one bad span must not end the thread
                log.exception("%d spans could not be exported to %s", len(spans), self.url)
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.lost += len(spans)

    def _take(self, most: int, timeout_s: float) -> list[Span]:
        spans: list[Span] = []
        with contextlib.suppress(queue.Empty):
            spans.append(self._queue.get(timeout=timeout_s))
            while len(spans) < most:
                spans.append(self._queue.get_nowait())
        return spans


@dataclass(frozen=True, slots=True)
class ExportingSink:
    """A sink that exports what another sink has recorded."""

    writer: TraceSink
    exporter: OtlpExporter

    def open(self, call: Call) -> None:
        self.writer.open(call)

    async def finish(self, call: Call) -> AttemptState | None:
        state = await self.writer.finish(call)
        self.exporter.put([_call_span(call)])
        return state

    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None:
        state = await self.writer.deliver(attempt_id, spans, rewards)
        if attempt_id is None or state is AttemptState.RUNNING:  # else it was refused
            known = {span.span_id for span in spans}
            plain = [_reward_span(reward) for reward in rewards if reward.key not in known]
            self.exporter.put([*spans, *plain])
        return state


def _call_span(call: Call) -> Span:
    """The gateway's span of a call, under the span that made it."""
    prompt, sampled = call.tokens or (0, 0)
    return Span(
        trace_id=call.trace_id or _hash(call.attempt_id or call.response_id, 16),
        span_id=_hash(call.id, 8),
        parent_span_id=call.span_id,
        name=f"chat {call.model}",
        kind="server",
        start_ns=int(call.started_at * 1e9),
        end_ns=int((call.ended_at or time.time()) * 1e9),
        status="error" if call.state is CallState.ERROR else "unset",
        attributes={  # those that are None are not exported
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "agentrl",
            "gen_ai.request.model": call.model,
            RESPONSE_ID: call.response_id,
            "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
            "gen_ai.usage.input_tokens": prompt or None,
            "gen_ai.usage.output_tokens": sampled or None,
            AGENT_NAME: call.agent,
            "agentrl.adapter": call.adapter,
            "agentrl.adapter.version": call.adapter_version,
            "error.type": call.error,
        },
        events=[],
        resource=_RESOURCE,
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
    )


def _reward_span(reward: Reward) -> Span:
    created_ns = int(reward.created_at * 1e9)
    return Span(
        trace_id=_hash(reward.attempt_id, 16),
        span_id=_hash(f"{reward.attempt_id} {reward.key}", 8),
        parent_span_id=None,
        name=REWARD_SPAN,
        kind="internal",
        start_ns=created_ns,
        end_ns=created_ns,
        status="unset",
        attributes={
            EVALUATION_NAME: reward.name,
            EVALUATION_VALUE: reward.value,
            EVALUATION_EXPLANATION: reward.explanation,
            AGENT_NAME: reward.agent,
            RESPONSE_ID: reward.response_id,
        },
        events=[],
        resource=_RESOURCE,
        rollout_id=reward.rollout_id,
        attempt_id=reward.attempt_id,
    )


def _hash(text: str, size: int) -> str:
    return blake2b(text.encode(), digest_size=size).hexdigest()
