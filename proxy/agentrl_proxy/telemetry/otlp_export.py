"""What was recorded also goes to an OTLP backend: Jaeger, Phoenix, Langfuse, a collector.

Knows OTLP/HTTP and that the backend may be slow or away: nobody waits for it, and what it does not
get is counted. Spans go as they came; calls and rewards of agents without OpenTelemetry as spans
of our own. Does not know how anything is recorded.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from agentrl_proxy.dependencies import SpanExporter, TraceSink
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
_MAX_SENT_AT_ONCE = 1_000
_TRIES = 4
_FIRST_PAUSE_S = 0.5
_TIMEOUT_S = 10.0
_LAST_WORDS_S = 5.0
_PASSING = frozenset(
    {408, 429, 502, 503, 504}
)  # https://opentelemetry.io/docs/specs/otlp/#failures
_RESOURCE = {"service.name": "agentrl-gateway"}


class OtlpExporter:
    """Sends spans on from a thread of its own.

    Args:
        endpoint: the backend's base URL; ``/v1/traces`` is added unless it is there.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str] | None = None) -> None:
        endpoint = endpoint.rstrip("/")
        self.url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
        self.sent = 0
        self.lost = 0
        self._headers = {**(headers or {}), "content-type": "application/x-protobuf"}
        self._queue: queue.Queue[Span] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="otlp-forward", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        return {"sent": self.sent, "lost": self.lost, "queued": self._queue.qsize()}

    def put(self, spans: Sequence[Span]) -> None:
        """Returns at once."""
        for span in spans:
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self._lose(1, f"{_MAX_QUEUED} spans wait for it already")

    def close(self) -> None:
        """Sends what it can within a few seconds; the rest is lost, and counted."""
        self._closing.set()
        self._thread.join(_LAST_WORDS_S)
        left = len(self._take(_MAX_QUEUED, 0.0))
        if left:
            self._lose(left, "it did not answer in time")

    def _run(self) -> None:
        import requests

        session = requests.Session()
        while True:
            spans = self._take(_MAX_SENT_AT_ONCE, 0.2)
            if spans:
                try:
                    self._send(session, spans)
                except Exception as error:  # one strange span must not end the thread
                    self._lose(len(spans), f"{type(error).__name__}: {error}")
            elif self._closing.is_set():
                return

    def _take(self, most: int, patience_s: float) -> list[Span]:
        spans: list[Span] = []
        try:
            if patience_s:
                spans.append(self._queue.get(timeout=patience_s))
            while len(spans) < most:
                spans.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return spans

    def _send(self, session: Any, spans: list[Span]) -> None:
        import requests

        from agentrl_tracer.otlp_codec import export_request

        body = export_request(spans)
        problem = ""
        for attempt in range(_TRIES):
            if attempt and self._closing.wait(_FIRST_PAUSE_S * 2 ** (attempt - 1)):
                break
            try:
                answer = session.post(self.url, body, headers=self._headers, timeout=_TIMEOUT_S)
            except requests.RequestException as error:
                problem = type(error).__name__
                continue
            if answer.ok:
                self.sent += len(spans)
                self._complained = False
                return
            problem = f"HTTP {answer.status_code}"
            if answer.status_code not in _PASSING:
                break
        self._lose(len(spans), problem)

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        if not self._complained:  # once, until it works again
            self._complained = True
            log.warning("the OTLP backend %s does not get everything: %s", self.url, why)


class ExportingSink:
    """A sink that lets another one record, and then tells the backend."""

    def __init__(self, writer: TraceSink, forward: SpanExporter) -> None:
        self._writer = writer
        self._forward = forward

    def open(self, call: Call) -> None:
        self._writer.open(call)

    async def finish(self, call: Call) -> AttemptState | None:
        state = await self._writer.finish(call)
        self._forward.put([_span_of_call(call)])
        return state

    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None:
        state = await self._writer.deliver(attempt_id, spans, rewards)
        if attempt_id is None or state is AttemptState.RUNNING:  # else it was refused
            known = {span.span_id for span in spans}
            plain = [_span_of_reward(reward) for reward in rewards if reward.key not in known]
            self._forward.put([*spans, *plain])
        return state


def _span_of_call(call: Call) -> Span:
    """The gateway's side of a call, under the span that made it."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentrl",
        "gen_ai.request.model": call.model,
        RESPONSE_ID: call.response_id,
        "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
        "gen_ai.usage.input_tokens": len(call.prompt_ids) or None,
        "gen_ai.usage.output_tokens": len(call.response_ids) or None,
        AGENT_NAME: call.agent,
        "agentrl.adapter": call.adapter,
        "agentrl.adapter.version": call.adapter_version,
        "error.type": call.error,
    }
    return Span(
        trace_id=call.trace_id or _trace_of(call.attempt_id or call.response_id),
        span_id=blake2b(call.id.encode(), digest_size=8).hexdigest(),
        parent_span_id=call.span_id,
        name=f"chat {call.model}",
        kind="server",
        start_ns=int(call.started_at * 1e9),
        end_ns=int((call.ended_at or time.time()) * 1e9),
        status="error" if call.state is CallState.ERROR else "unset",
        attributes={name: value for name, value in attributes.items() if value is not None},
        events=[],
        resource=_RESOURCE,
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
    )


def _span_of_reward(reward: Reward) -> Span:
    moment = int(reward.created_at * 1e9)
    attributes = {
        EVALUATION_NAME: reward.name,
        EVALUATION_VALUE: reward.value,
        EVALUATION_EXPLANATION: reward.explanation,
        RESPONSE_ID: reward.response_id,
    }
    return Span(
        trace_id=_trace_of(reward.attempt_id),
        span_id=blake2b(f"{reward.attempt_id} {reward.key}".encode(), digest_size=8).hexdigest(),
        parent_span_id=None,
        name=REWARD_SPAN,
        kind="internal",
        start_ns=moment,
        end_ns=moment,
        status="unset",
        attributes={name: value for name, value in attributes.items() if value is not None},
        events=[],
        resource=_RESOURCE,
        rollout_id=reward.rollout_id,
        attempt_id=reward.attempt_id,
    )


def _trace_of(attempt_id: str) -> str:
    return blake2b(attempt_id.encode(), digest_size=16).hexdigest()
