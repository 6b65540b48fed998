"""Answer a client's retry (``x-stainless-retry-count`` > 0) with the answer of its request.

Identical requests are separate samples, so a retry must find the one that it repeats:

1. One that failed in this process: the retry is sampled in its place.
2. One that is running: the retry waits for its answer.
3. The newest one with an answer in the store: the answer is replayed. Answers that a later call
   continued come last: their clients have them.
4. Without any, the retry is sampled like a new request.

The store identifies a request by its attempt, wire request, protocol, agent and idempotency key. So
a retry gets the same ids, text and tool calls before and after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl_proxy.protocols import chat_objects
from agentrl_tracer.schemas import Call, CallState, PastCall

if TYPE_CHECKING:
    from agentrl_proxy.requests.lifecycle import ClientRequest

Completion = dict[str, Any]
"""A whole chat completion: the form of every answer before its dialect writes it."""


@dataclass(slots=True)
class IdenticalRequests:
    """What became of one attempt's identical requests, for the client retries among them."""

    running: list[ClientRequest] = field(default_factory=list[Any])
    failed: int = 0  # that a retry will take the place of


def begin(request: ClientRequest) -> None:
    """Register a request that will be sampled. ``end`` must follow."""
    if request.memory is not None:
        same = request.memory.requests.setdefault(request.key, IdenticalRequests())
        same.running.append(request)


def end(request: ClientRequest, answer: Completion | None, *, may_retry: bool = True) -> None:
    """Wake the retries that wait for a request.

    Args:
        answer: the durable answer; None if the request failed.
        may_retry: whether the client of a failed request may retry it.
    """
    request.answer.set_result(answer)
    if request.memory is None:
        return
    requests = request.memory.requests
    same = requests[request.key]
    same.running.remove(request)
    same.failed += answer is None and may_retry
    if not (same.running or same.failed):
        del requests[request.key]


async def find(request: ClientRequest) -> Completion | None:
    """Return the answer of the request that a retry repeats; None: sample the retry."""
    memory = request.memory
    if memory is None:
        return None
    await asyncio.sleep(0)  # first see the closed connection of the repeated request
    while same := memory.requests.get(request.key):
        if same.failed:
            same.failed -= 1
            return None
        if not same.running:
            break
        running = min(same.running, key=lambda one: one.waiting)
        running.waiting += 1
        try:
            answer = await asyncio.shield(running.answer)
        finally:
            running.waiting -= 1
        if answer is not None:
            return answer
    # In a thread: it may read many long requests.
    store = request.admission.deps.store
    past = await asyncio.to_thread(store.same_requests, memory.attempt.attempt_id, request.raw)
    return _answer(request, past)


def _answer(request: ClientRequest, past: Sequence[PastCall]) -> Completion | None:
    """Choose among the stored answers of identical requests, which are in order of acceptance."""
    stored: dict[str, list[PastCall]] = {}
    wanted = (request.agent, request.headers.get("idempotency-key"))
    for one in past:
        call = one.call
        protocol = call.response_id.startswith(request.dialect.id_prefix)
        if protocol and (call.agent, call.params.get("idempotency_key")) == wanted:
            stored.setdefault(call.response_id, []).append(one)
    heard: list[Call] | None = None
    for choices in reversed(stored.values()):
        calls = [one.call for one in choices]
        if not _is_answered(request, calls):
            continue
        if not any(one.continued for one in choices):
            return _completion(calls)
        heard = heard or calls
    return None if heard is None else _completion(heard)


def _is_answered(request: ClientRequest, calls: Sequence[Call]) -> bool:
    """Whether the rows of a request are all of its answer. A provider may give fewer choices than
    requested; our own sampler (it alone reports prompt tokens) gives all of them."""
    prompts = {call.choice // request.parts[0].n for call in calls if _is_whole(call)}
    return len(prompts) == len(request.parts) and all(
        _is_whole(call) or (not call.prompt_ids and call.ended_at is not None) for call in calls
    )


def _is_whole(call: Call) -> bool:
    """Whether it has its whole answer, delivered or not."""
    return call.state is CallState.COMPLETED or "undelivered" in call.params


def _completion(calls: Sequence[Call]) -> Completion:
    parts: dict[int, Completion] = {}  # by prompt
    for call in calls:
        if _is_whole(call) and (said := call.response):
            empty = {**said, "choices": [], "usage": said["usage"] or {}}
            parts.setdefault(call.seq, empty)["choices"] += said["choices"]
    return chat_objects.together([*parts.values()])
