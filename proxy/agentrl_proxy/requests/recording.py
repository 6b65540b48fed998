"""Write the Call rows of a request: opened when accepted, finished before the answer leaves.

Each choice has a row; the choices of one prompt share its ``seq``. Does not know HTTP bodies or
templates.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from agentrl_proxy.requests.auth import caller_digest
from agentrl_proxy.sampler import FinishEvent, TokenEvent
from agentrl_tracer.conventions import AGENT_HEADER, REQUEST_HEADER
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

if TYPE_CHECKING:
    from agentrl_proxy.requests.lifecycle import ClientRequest

RESPONSE_PREFIX = "resp_"
CALLER = "caller"  # in ``Call.params``: whose response it is, outside rollouts
BASE_MODEL = "base_model"  # the same: the base model whose tokens the call has
_MAX_REQUEST_ID = 64
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(slots=True)
class Sampled:
    """What one choice has sampled so far."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    tops: list[Sequence[tuple[int, float]]] = field(default_factory=list[Any])
    version: int | None = None  # the oldest: an adapter may be swapped during the answer
    versions: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, int | None]])
    """(first token, version) of each stretch that one version sampled."""
    finish: FinishEvent | None = None
    cut_at_call: bool = False  # ended before a second tool call that the request excluded

    def add(self, event: TokenEvent, *, tops: bool) -> None:
        if not self.versions or event.adapter_version != self.versions[-1][1]:
            self.versions.append((len(self.ids), event.adapter_version))
            known = [version for _, version in self.versions if version is not None]
            self.version = min(known) if len(known) == len(self.versions) else None
        self.ids.append(event.token_id)
        self.logprobs.append(event.logprob)
        if tops:
            self.tops.append(event.top or ())


def open_calls(
    client: ClientRequest,
    part: Any,
    seq: int,
    params: dict[str, Any],
    *,
    prompt_ids: list[int] | None = None,
    adapter: str | None = None,
    adapter_version: int | None = None,
    skip_reason: SkipReason | None = None,
) -> list[Call]:
    """Open a row for each choice. From now on they exist, whatever happens.

    Args:
        part: a ChatRequest or ProviderRequest, perhaps one of several prompts of ``client``.
        prompt_ids: None where a provider's model answers.
        skip_reason: why no choice will train.
    """
    deps, headers, response_id = client.admission.deps, client.headers, client.heading.id
    attempt = None if client.memory is None else client.memory.attempt
    trace_id, span_id = trace_context(headers)
    if (key := headers.get("idempotency-key")) is not None:  # see client_retries.py
        params = {**params, "idempotency_key": key}
    if attempt is None and client.dialect.id_prefix == RESPONSE_PREFIX:
        params = {**params, CALLER: caller_digest(headers)}  # see stored_responses.py
    if attempt is None and prompt_ids is not None and deps.base_model is not None:
        params = {**params, BASE_MODEL: deps.base_model}
    if (known_as := request_id(headers)) is not None:
        params = {**params, "request_id": known_as}
    first = Call(
        id=f"{response_id}#{part.first_choice}" if part.first_choice else response_id,
        response_id=response_id,
        choice=part.first_choice,
        run_id=deps.run_id if attempt is None else attempt.run_id,
        rollout_id=None if attempt is None else attempt.rollout_id,
        attempt_id=None if attempt is None else attempt.attempt_id,
        seq=seq,
        agent=client.agent,
        model=client.raw["model"],
        adapter=adapter,
        adapter_version=adapter_version,
        state=CallState.OPEN,
        prompt_ids=prompt_ids or [],
        response_ids=[],
        response_logprobs=[],
        finish_reason=None,
        params=params,
        request=client.raw,
        response=None,
        error=None,
        trace_id=trace_id,
        span_id=span_id,
        started_at=time.time(),
        ended_at=None,
        skip_reason=SkipReason.NO_ROLLOUT if attempt is None else skip_reason,
    )
    others = range(part.first_choice + 1, part.first_choice + part.n)
    calls = [first, *(replace(first, id=f"{response_id}#{i}", choice=i) for i in others)]
    for call in calls:
        deps.writer.open(call)
    return calls


def finished_call(
    call: Call,
    sampled: Sampled,
    state: CallState,
    response: dict[str, Any] | None,
    skip_reason: SkipReason | None,
    error: str | None,
    error_status: int | None,
) -> Call:
    """Return the row of a choice with what it sampled and how it ended."""
    params, finish = dict(call.params), sampled.finish
    if len(sampled.versions) > 1:
        params |= {"mixed_versions": True, "versions": [list(one) for one in sampled.versions]}
    if error_status is not None:
        params["error_status"] = error_status
    if sampled.cut_at_call:
        params["cut_at_second_call"] = True
    if finish is not None and finish.log_mass is not None:
        params["constrained_log_mass"] = finish.log_mass
    return replace(
        call,
        adapter_version=sampled.version if sampled.ids else call.adapter_version,
        state=state,
        response_ids=sampled.ids,
        response_logprobs=sampled.logprobs,
        finish_reason=None if finish is None else finish.reason,
        params=params,
        response=response,
        error=error,
        ended_at=time.time(),
        skip_reason=call.skip_reason or skip_reason,
    )


async def latest_state(commits: Sequence[Awaitable[AttemptState | None]]) -> AttemptState | None:
    """Await the commits of one request's rows and return the attempt's latest state."""
    if len(commits) == 1:
        return await commits[0]
    states = await asyncio.gather(*commits)
    return next((state for state in states if state is not AttemptState.RUNNING), states[0])


def agent_name(headers: Mapping[str, str]) -> str | None:
    """Return the agent (role) that the request names as its sender."""
    name = headers.get(AGENT_HEADER)
    return None if name is None else unquote(name).replace("\0", "\ufffd")


def request_id(headers: Mapping[str, str]) -> str | None:
    """Return the id by which the tracer in the agent's process knows the request."""
    return headers.get(REQUEST_HEADER, "")[:_MAX_REQUEST_ID] or None


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the client says that it sends this request again."""
    return headers.get("x-stainless-retry-count", "0") != "0"


def trace_context(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return trace and span id of a valid W3C ``traceparent`` header, else (None, None)."""
    found = _TRACEPARENT.match(headers.get("traceparent", ""))
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return None, None
    return found[1], found[2]


def derived_seed(attempt_seed: int, seq: int) -> int:
    """Return the seed of a request that set none: the same in every process and run."""
    digest = blake2b(f"{attempt_seed}:{seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits fit into torch and JSON
