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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory
from agentrl_proxy.requests.recording import agent_name
from agentrl_tracer.schemas import AttemptRef, Call, CallState, PastCall

if TYPE_CHECKING:
    from agentrl_tracer.store import Store

Completion = dict[str, Any]
"""A whole chat completion: the form of every answer before its dialect writes it."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request, what makes another one identical to it, and who waits for its answer."""

    key: bytes
    raw: dict[str, Any]
    dialect: chat_objects.Dialect
    agent: str | None
    name: str | None  # the idempotency key
    prompts: int
    n: int  # choices for each prompt
    answer: asyncio.Future[Completion | None]
    """Resolves once the answer is durable; None if the request failed."""
    waiting: int = 0
    """Client retries that wait for the answer. While there are any, the request outlives its own
    client."""


@dataclass(slots=True)
class IdenticalRequests:
    """What became of one attempt's identical requests, for the client retries among them."""

    running: list[TrackedRequest] = field(default_factory=list[TrackedRequest])
    failed: int = 0  # that a retry will take the place of


def identify(
    raw: dict[str, Any],
    body: bytes,
    dialect: chat_objects.Dialect,
    headers: Mapping[str, str],
    prompts: int = 1,
    n: int = 1,
) -> TrackedRequest:
    agent, name = agent_name(headers), headers.get("idempotency-key")
    origin = f"{dialect.id_prefix}{agent}\0{name or ''}\0".encode()
    key = blake2b(origin + body, digest_size=16).digest()
    answer = asyncio.get_running_loop().create_future()
    return TrackedRequest(key, raw, dialect, agent, name, prompts, n, answer)


@dataclass(frozen=True, slots=True)
class ClientRetries:
    """Keeps track of requests, and finds the answers for their retries."""

    store: Store
    attempts: AttemptMemories

    def begin(self, request: TrackedRequest, memory: AttemptMemory | None) -> None:
        """Register a request that will be sampled. ``end`` must follow."""
        if memory is not None:
            memory.requests.setdefault(request.key, IdenticalRequests()).running.append(request)

    def end(
        self,
        request: TrackedRequest,
        memory: AttemptMemory | None,
        answer: Completion | None,
        *,
        may_retry: bool = True,
    ) -> None:
        """Wake the retries that wait for a request. Safe to call twice.

        Args:
            answer: the durable answer; None if the request failed.
            may_retry: whether the client of a failed request may retry it.
        """
        if request.answer.done():
            return
        request.answer.set_result(answer)
        if memory is None:
            return
        same = memory.requests[request.key]
        same.running.remove(request)
        same.failed += answer is None and may_retry
        if not (same.running or same.failed):
            del memory.requests[request.key]

    async def find(self, request: TrackedRequest, attempt: AttemptRef | None) -> Completion | None:
        """Return the answer of the request that a retry repeats; None: sample the retry."""
        if attempt is None:
            return None
        await asyncio.sleep(0)  # first see the closed connection of the repeated request
        memory = self.attempts.get(attempt.attempt_id)
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
        past = await asyncio.to_thread(self.store.same_requests, attempt.attempt_id, request.raw)
        return _answer(request, past)


def _answer(request: TrackedRequest, past: Sequence[PastCall]) -> Completion | None:
    """Choose among the stored answers of identical requests, which are in order of acceptance."""
    stored: dict[str, list[PastCall]] = {}
    for one in past:
        call = one.call
        origin = (call.agent, call.params.get("idempotency_key"))
        protocol = call.response_id.startswith(request.dialect.id_prefix)
        if protocol and origin == (request.agent, request.name):
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


def _is_answered(request: TrackedRequest, calls: Sequence[Call]) -> bool:
    """Whether the rows of a request are all of its answer. A provider may give fewer choices than
    requested; our own sampler (it alone reports prompt tokens) gives all of them."""
    prompts = {call.choice // request.n for call in calls if call.state is CallState.COMPLETED}
    return len(prompts) == request.prompts and all(
        call.state is CallState.COMPLETED or (not call.prompt_ids and call.ended_at is not None)
        for call in calls
    )


def _completion(calls: Sequence[Call]) -> Completion:
    parts: dict[int, Completion] = {}  # by prompt
    for call in calls:
        if call.state is CallState.COMPLETED and (said := call.response):
            empty = {**said, "choices": [], "usage": said["usage"] or {}}
            parts.setdefault(call.seq, empty)["choices"] += said["choices"]
    return chat_objects.together([*parts.values()])
