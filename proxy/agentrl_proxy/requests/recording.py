"""How a request becomes Call rows: opened when accepted, finished before its answer leaves.

Knows the Call record, its writer and what a sampler's events add up to. Does not know HTTP or
templates. One row per choice; the choices of a request share its ``seq``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any
from urllib.parse import unquote

from agentrl_proxy.dependencies import TraceSink
from agentrl_proxy.sampler import DecodingParams, FinishEvent, TokenEvent
from agentrl_tracer.conventions import AGENT_HEADER
from agentrl_tracer.schemas import AttemptRef, AttemptState, Call, CallState, SkipReason

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(slots=True)
class Sampled:
    """What one choice has sampled so far."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    tops: list[Sequence[tuple[int, float]]] = field(
        default_factory=list[Sequence[tuple[int, float]]]
    )
    version: int | None = None  # the oldest: an adapter may be swapped in mid-answer
    versions: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, int | None]])
    """(first token, version) of each stretch that one version sampled."""
    finish: FinishEvent | None = None
    cut_at_call: bool = False  # ended where a second tool call began, which nobody had asked for

    def add(self, event: TokenEvent, *, tops: bool) -> None:
        if not self.versions or event.adapter_version != self.versions[-1][1]:
            self.versions.append((len(self.ids), event.adapter_version))
            known = [version for _, version in self.versions if version is not None]
            self.version = min(known) if len(known) == len(self.versions) else None
        self.ids.append(event.token_id)
        self.logprobs.append(event.logprob)
        if tops:
            self.tops.append(event.top or ())


class CallRecord:
    """The rows of one request."""

    def __init__(self, writer: TraceSink, calls: list[Call]) -> None:
        self._writer = writer
        self._calls = calls
        self.finished = False
        for call in calls:
            writer.open(call)

    async def finish(
        self,
        sampled: Sequence[Sampled],
        state: CallState,
        *,
        responses: Sequence[dict[str, Any] | None] = (),
        skip_reason: SkipReason | None = None,
        error: str | None = None,
    ) -> AttemptState | None:
        """Makes the rows durable; returns the attempt's state as of that commit.

        Args:
            responses: of each choice; one that has one is completed.
            state, skip_reason, error: of the others.
        """
        self.finished = True
        ended_at = time.time()
        rows = [
            self._row(call, one, CallState.COMPLETED, ended_at, response=responses[i])
            if responses and responses[i] is not None
            else self._row(call, one, state, ended_at, skip_reason=skip_reason, error=error)
            for i, (call, one) in enumerate(zip(self._calls, sampled, strict=True))
        ]
        if len(rows) == 1:
            return await self._writer.finish(rows[0])
        states = await asyncio.gather(*(self._writer.finish(row) for row in rows))
        # One commit may seal between another's rows: the latest state rules.
        return next((s for s in states if s is not AttemptState.RUNNING), states[0])

    @staticmethod
    def _row(
        call: Call,
        sampled: Sampled,
        state: CallState,
        ended_at: float,
        *,
        response: dict[str, Any] | None = None,
        skip_reason: SkipReason | None = None,
        error: str | None = None,
    ) -> Call:
        params = call.params
        if len(sampled.versions) > 1:
            stretches = [list(stretch) for stretch in sampled.versions]
            params = {**params, "mixed_versions": True, "versions": stretches}
        if sampled.cut_at_call:
            params = {**params, "cut_at_second_call": True}
        if sampled.finish is not None and sampled.finish.log_mass is not None:
            params = {**params, "constrained_log_mass": sampled.finish.log_mass}
        return replace(
            call,
            adapter_version=sampled.version if sampled.ids else call.adapter_version,
            state=state,
            response_ids=sampled.ids,
            response_logprobs=sampled.logprobs,
            finish_reason=None if sampled.finish is None else sampled.finish.reason,
            params=params,
            response=response,
            error=error,
            ended_at=ended_at,
            skip_reason=call.skip_reason or skip_reason,
        )


def open_calls(
    writer: TraceSink,
    *,
    response_id: str,
    run_id: str | None,
    attempt: AttemptRef | None,
    seq: int,
    model: str,
    adapter: str | None,
    adapter_version: int | None,
    prompt_ids: list[int],
    continued: bool,
    constrained: str | None = None,
    branched: str | None = None,
    not_enforced: Sequence[str] = (),
    params: DecodingParams,
    request: dict[str, Any],
    headers: Mapping[str, str],
    choices: Sequence[int],
    again: bool = False,
) -> CallRecord:
    """Accepts a request: its rows exist from now on, whatever happens.

    Args:
        constrained: what a grammar enforced, see agentrl_proxy.rendering.structured_output.
        branched: why the prompt continues no earlier call, see agentrl_proxy.rendering.continuity.
        not_enforced: what of the request only a grammar could have met, see openai_types, or what
            of its schemas no grammar can, see constraints.
        choices: a row for each; indices in the response, which may answer several prompts.
        again: these choices have failed before, and have rows of that.
    """
    extra: dict[str, Any] = client_marks(headers)
    if constrained is not None:
        extra["constrained"] = constrained
    if branched is not None:
        extra["branched"] = branched
    if not_enforced:
        extra["not_enforced"] = list(not_enforced)
    if params.logit_bias:
        extra["logit_bias"] = {str(i): value for i, value in params.logit_bias}
    trace_id, span_id = trace_context(headers)
    tried = seq if again else None
    first = Call(
        id=row_id(response_id, choices[0], tried),
        response_id=response_id,
        choice=choices[0],
        run_id=run_id if attempt is None else attempt.run_id,
        rollout_id=None if attempt is None else attempt.rollout_id,
        attempt_id=None if attempt is None else attempt.attempt_id,
        seq=seq,
        agent=agent_name(headers),
        model=model,
        adapter=adapter,
        adapter_version=adapter_version,
        state=CallState.OPEN,
        prompt_ids=prompt_ids,
        response_ids=[],
        response_logprobs=[],
        finish_reason=None,
        params={
            # By hand: ``asdict`` copies deeply, and this runs for every request.
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop": list(params.stop),
            "seed": params.seed,
            "n": params.n,
            "continued": continued,
            **extra,
        },
        request=request,
        response=None,
        error=None,
        trace_id=trace_id,
        span_id=span_id,
        started_at=time.time(),
        ended_at=None,
        skip_reason=SkipReason.NO_ROLLOUT if attempt is None else None,
    )
    others = [replace(first, id=row_id(response_id, i, tried), choice=i) for i in choices[1:]]
    return CallRecord(writer, [first, *others])


def row_id(response_id: str, choice: int, again: int | None = None) -> str:
    """Of one choice. ``again``: the ``seq`` of a further try, where an earlier one failed."""
    if again is not None:
        return f"{response_id}#{choice}@{again}"
    return f"{response_id}#{choice}" if choice else response_id


def agent_name(headers: Mapping[str, str]) -> str | None:
    """Which agent (role) makes the call, as it says itself."""
    name = headers.get(AGENT_HEADER)
    return None if name is None else unquote(name).replace("\0", "\ufffd")


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it has sent this same request before."""
    return headers.get("x-stainless-retry-count", "0") != "0"


def client_marks(headers: Mapping[str, str]) -> dict[str, Any]:
    """By what retries tell this request from identical ones, for ``Call.params``: its name, if the
    client gives it one, and whether it is a retry itself, of one that got no answer."""
    marks: dict[str, Any] = {}
    if (key := headers.get("idempotency-key")) is not None:
        marks["idempotency_key"] = key
    if is_retry(headers):
        marks["client_retry"] = True
    return marks


def trace_context(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Trace and span id of a W3C ``traceparent`` header; (None, None) without a valid one."""
    found = _TRACEPARENT.match(headers.get("traceparent", ""))
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return None, None
    return found[1], found[2]


def derived_seed(attempt_seed: int, seq: int) -> int:
    """The seed of an attempt's request that brought none: the same in every process and run."""
    digest = blake2b(f"{attempt_seed}:{seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: torch and JSON take them
