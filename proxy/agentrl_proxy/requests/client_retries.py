"""Answer a client's retry (``x-stainless-retry-count`` > 0) with the answer of its request.

Identical requests are separate samples, so a retry must find the one that it repeats:

1. One that failed lately: the retry is sampled in its place.
2. One that an earlier gateway process answered and no agent continued: its answer is replayed.
3. One that is running: the retry waits for its answer.
4. Else the newest answer is replayed. Without one, the retry is sampled like a new request.

Answers are read from the store, which identifies a request by its attempt, wire request, protocol,
agent and idempotency key. So a retry gets the same ids, text and tool calls before and after a
restart. Memory only holds what is running and what failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import (
    AttemptMemories,
    AttemptMemory,
    IdenticalRequests,
    RunningRequest,
)
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.recording import agent_name
from agentrl_tracer.schemas import CallState, PastCall

if TYPE_CHECKING:
    from agentrl_tracer.store import Store

RETRY_WITHIN_S = 90.0  # a client that was refused retries sooner, or not at all
MAX_REMEMBERED = 64  # different requests of one attempt; also failures of identical ones
_CONCURRENT_LOOKUPS = 4  # after a restart many clients retry, and the store serves others too
_FAILED = (CallState.ERROR, CallState.CANCELLED)

Completion = dict[str, Any]
"""A whole chat completion: the form of every answer before its dialect writes it."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What makes two requests of an attempt identical: ``key`` in memory, the rest in the store."""

    key: bytes
    raw: dict[str, Any]
    dialect: chat_objects.Dialect
    agent: str | None
    name: str | None  # the idempotency key
    prompts: int
    n: int  # choices for each prompt


def identify(
    raw: dict[str, Any],
    body: bytes,
    dialect: chat_objects.Dialect,
    headers: Mapping[str, str],
    prompts: int = 1,
    n: int = 1,
) -> RequestIdentity:
    agent, name = agent_name(headers), headers.get("idempotency-key")
    origin = f"{dialect.id_prefix}{agent}\0{name or ''}\0".encode()
    key = blake2b(origin + body, digest_size=16).digest()
    return RequestIdentity(key, raw, dialect, agent, name, prompts, n)


class ClientRetries:
    """Keeps track of requests, and finds the answers for their retries."""

    def __init__(self, store: Store, attempts: AttemptMemories) -> None:
        self._store = store
        self._attempts = attempts
        self._lookups = asyncio.Semaphore(_CONCURRENT_LOOKUPS)

    def begin(self, identity: RequestIdentity, memory: AttemptMemory | None) -> RunningRequest:
        """Register a request that will be sampled. ``end`` must follow."""
        answer = asyncio.get_running_loop().create_future()
        running = RunningRequest(identity.key, memory, answer)
        if memory is not None:
            _remember(memory, identity.key).running.append(running)
        return running

    def end(
        self, running: RunningRequest, answer: Completion | None, *, retried: bool = True
    ) -> None:
        """Wake the retries that wait for a request. Safe to call twice.

        Args:
            answer: the durable answer; None if the request failed.
            retried: whether the client of a failed request may retry it.
        """
        if running.answer.done():
            return
        running.answer.set_result(answer)
        if running.memory is None:
            return
        requests = running.memory.requests
        same = requests[running.key]
        same.running.remove(running)
        if answer is None and retried:
            same.failed = [*same.failed, time.monotonic()][-MAX_REMEMBERED:]
        if not (same.running or same.failed or same.unheard or same.recalled):
            del requests[running.key]

    async def find(self, identity: RequestIdentity, caller: Caller) -> Completion | None:
        """Return the answer of the request that a retry repeats; None: sample the retry."""
        if caller.attempt is None:
            return None
        await asyncio.sleep(0)  # first see the closed connection of the repeated request
        attempt_id = caller.attempt.attempt_id
        memory = self._attempts.get(attempt_id)
        while True:
            past: list[_StoredRequest] | None = None
            same = memory.requests.get(identity.key) or IdenticalRequests()
            if memory.first_seq != 0 and not same.recalled:
                past = await self._stored(identity, attempt_id)
                same = _remember(memory, identity.key)
                if not same.recalled:  # no other retry recalled it during the lookup
                    _recall(same, past, memory.first_seq)
            if _take_failure(same):
                return None
            if not same.unheard and same.running:
                answer = await _wait(min(same.running, key=lambda one: one.waiting))
                if answer is not None:
                    return answer
                continue
            response_id = same.unheard.pop() if same.unheard else None
            if past is None:
                past = await self._stored(identity, attempt_id)
            return _answer(past, response_id, memory.first_seq)

    async def _stored(self, identity: RequestIdentity, attempt_id: str) -> list[_StoredRequest]:
        async with self._lookups:  # in a thread: it may read many long requests
            calls = await asyncio.to_thread(self._store.same_requests, attempt_id, identity.raw)
        by_response: dict[str, list[PastCall]] = {}
        for past in calls:
            call = past.call
            identical = (call.agent, call.params.get("idempotency_key")) == (
                identity.agent,
                identity.name,
            )
            if identical and call.response_id.startswith(identity.dialect.id_prefix):
                by_response.setdefault(call.response_id, []).append(past)
        return [_StoredRequest(calls, identity) for calls in by_response.values()]


class _StoredRequest:
    """An identical request in the store, with the rows of all its choices."""

    def __init__(self, calls: Sequence[PastCall], identity: RequestIdentity) -> None:
        self._calls = [past.call for past in calls]
        first = self._calls[0]
        self.response_id = first.response_id
        self.seq = first.seq
        self.is_retry = bool(first.params.get("client_retry"))
        self.was_continued = any(past.continued for past in calls)
        done = [call for call in self._calls if call.state is CallState.COMPLETED]
        # A provider may give fewer choices than requested; our own sampler (it alone reports
        # prompt tokens) gives all of them.
        given_up = [c for c in self._calls if not c.prompt_ids and c.ended_at is not None]
        prompts = {call.choice // identity.n for call in done}
        self.answered = len(prompts) == identity.prompts and len(
            {call.id for call in (*done, *given_up)}
        ) == len(self._calls)

    @property
    def failed_lately(self) -> bool:
        """Whether its client may still retry it. A lost gateway leaves no end time."""
        now = time.time()
        return any(
            call.state in _FAILED
            and (call.ended_at is None or now - call.ended_at < RETRY_WITHIN_S)
            for call in self._calls
        )

    def answer(self) -> Completion:
        parts: list[Completion] = []
        for seq in dict.fromkeys(call.seq for call in self._calls):
            said = [
                response
                for call in self._calls
                if call.seq == seq and (response := call.response) and call.state not in _FAILED
            ]
            choices = [choice for one in said for choice in one["choices"]]
            parts.append({**said[0], "choices": choices, "usage": said[0]["usage"] or {}})
        return chat_objects.together(parts)


def _remember(memory: AttemptMemory, key: bytes) -> IdenticalRequests:
    same = memory.requests.setdefault(key, IdenticalRequests())
    memory.requests.move_to_end(key)
    if len(memory.requests) > MAX_REMEMBERED:
        idle = (k for k, one in memory.requests.items() if not one.running and k != key)
        memory.requests.pop(next(idle, b""), None)
    return same


def _recall(same: IdenticalRequests, past: Sequence[_StoredRequest], first_seq: int | None) -> None:
    """Take over what earlier gateway processes left: failures, else unheard answers."""
    same.recalled = True
    earlier = [one for one in past if first_seq is None or one.seq < first_seq]
    failures = retried = 0
    for one in earlier:
        retried += one.is_retry and retried < failures
        failures += not one.answered and one.failed_lately
    same.failed += [time.monotonic()] * (failures - retried)
    if not failures:
        same.unheard = [
            one.response_id for one in earlier if one.answered and not one.was_continued
        ]


def _take_failure(same: IdenticalRequests) -> bool:
    """Take the oldest recent failure, if there is one."""
    long_ago = time.monotonic() - RETRY_WITHIN_S
    same.failed = [when for when in same.failed if when >= long_ago]
    if same.failed:
        del same.failed[0]
        return True
    return False


async def _wait(running: RunningRequest) -> Completion | None:
    running.waiting += 1
    try:
        return await asyncio.shield(running.answer)
    finally:
        running.waiting -= 1


def _answer(
    past: Sequence[_StoredRequest], response_id: str | None, first_seq: int | None
) -> Completion | None:
    """The answer with this id; else the newest, those of this process before earlier ones."""
    answered = [one for one in past if one.answered]
    chosen = next((one for one in answered if one.response_id == response_id), None)
    if chosen is None and answered:
        newest = [one for one in answered if first_seq is not None and one.seq >= first_seq]
        heard = [one for one in answered if one.was_continued]
        chosen = max(newest or heard or answered, key=lambda one: one.seq)
    return None if chosen is None else chosen.answer()
