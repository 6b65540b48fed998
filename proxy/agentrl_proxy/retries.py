"""What a client's marked retry is answered with: what the request that it repeats was told.

Knows what attempts remember while a gateway runs, and what the store has of requests that nobody
remembers any more, because the gateway was restarted or too much came after. Does not know who
answers requests, nor routes.

In the store a request is recognised by itself: same attempt, same wire request, protocol, agent and
idempotency key. Its answer is the recorded one, said again, so a retry after a restart hears the
same ids, text and tool calls as one before. What a gateway left open when it died, or failed, is
sampled anew, once for each; a failure that was told only while its client may still come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl_proxy import wire
from agentrl_proxy.attempts import RETRY_WITHIN_S, Attempt, Attempts
from agentrl_proxy.auth import Caller
from agentrl_proxy.deps import GatewayStats, GatewayStore
from agentrl_proxy.recording import agent_name
from agentrl_tracer.schemas import CallState, PastCall

_LOOKING_AT_ONCE = 4  # after a restart many clients retry; the store has others to serve
_FAILED = (CallState.ERROR, CallState.CANCELLED)


class EarlierAnswers:
    """The answers that have been given, whichever service gave them."""

    def __init__(self, store: GatewayStore, attempts: Attempts, stats: GatewayStats) -> None:
        self._store = store
        self._attempts = attempts
        self._stats = stats
        self._looking = asyncio.Semaphore(_LOOKING_AT_ONCE)

    async def find(
        self,
        raw: dict[str, Any],
        body: bytes,
        prompts: int,
        dialect: wire.Dialect,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> list[dict[str, Any]] | None:
        """The answer (a chat completion) of each job of an identical request of this attempt,
        waited for if still on its way; None: it has to be sampled.

        Args:
            raw: the wire request.
            body: what memory knows it by.
            prompts: how many jobs it is.
        """
        if caller.attempt is None:
            return None
        # The client closed the connection of the request that it repeats: let that be seen first.
        await asyncio.sleep(0)
        attempt_id, name = caller.attempt.attempt_id, headers.get("idempotency-key")
        memory = self._attempts.get(attempt_id)
        if not memory.knows_all(body, name):
            async with self._looking:  # in a thread: it may be many calls with long requests
                past = await asyncio.to_thread(self._store.same_requests, attempt_id, raw)
            if not memory.knows_all(body, name):  # nobody else has looked meanwhile
                _recall(memory, past, body, prompts, dialect, headers)
        try:
            answers = await memory.earlier(body, name)
        finally:
            memory.trim()
        self._stats.replayed += len(answers or ())
        return answers


def _recall(
    memory: Attempt,
    past: Iterable[PastCall],
    body: bytes,
    prompts: int,
    dialect: wire.Dialect,
    headers: Mapping[str, str],
) -> None:
    """Gives memory back what the store has of the request with this body."""
    agent, name = agent_name(headers), headers.get("idempotency-key")
    known = memory.knows(body, name)
    requests: dict[str, list[PastCall]] = {}
    for one in past:
        call = one.call
        if memory.first_seq is not None and call.seq >= memory.first_seq and known:
            continue  # since this memory began: that is what it knows
        same = (call.agent, call.params.get("idempotency_key")) == (agent, name)
        if same and call.response_id.startswith(dialect.id_prefix):
            requests.setdefault(call.response_id, []).append(one)
    heard: list[list[dict[str, Any]]] = []
    missed: list[list[dict[str, Any]]] = []
    lately: list[list[dict[str, Any]]] = []
    unanswered = 0
    for calls in requests.values():
        if calls[0].call.params.get("client_retry") and unanswered:
            unanswered -= 1  # it was sampled in the place of one of these
        answers = [_answer(calls, prompt, dialect) for prompt in range(prompts)]
        whole = [one for one in answers if one is not None]
        if len(whole) == prompts:
            before = memory.first_seq is None or calls[0].call.seq < memory.first_seq
            if any(one.continued for one in calls):
                heard.append(whole)
            elif before and all(map(_lately, calls)):
                lately.append(whole)
            else:
                missed.append(whole)
        elif any(one.call.state in _FAILED and _lately(one) for one in calls):
            unanswered += 1
    # Whom an agent went on from has been heard: a retry asks rather for another, and for the last.
    told = [*heard, *missed]
    if unanswered:  # the retries are theirs
        told, lately = [*told, *lately], []
    memory.recall(body, name, told, lately, unanswered)


def _lately(past: PastCall) -> bool:
    """Whether a client may still come back for it. Of one that was lost with its gateway nobody
    knows when that was."""
    ended_at = past.call.ended_at
    return ended_at is None or time.time() - ended_at < RETRY_WITHIN_S


def _answer(calls: Sequence[PastCall], prompt: int, dialect: wire.Dialect) -> dict[str, Any] | None:
    """What was answered to one prompt of a request; None: nothing, or its gateway died before all
    its choices were durable. (One that a provider never gave is durable, as an error.)"""
    n = calls[0].call.params.get("n") or 1
    rows = [one.call for one in calls if one.call.choice // n == prompt]
    if len(rows) < n or any(row.ended_at is None for row in rows):
        return None
    parts = [row.response for row in rows if row.state is CallState.COMPLETED and row.response]
    if not parts:
        return None
    # Of other models the chat completion is recorded, whatever the protocol.
    said = [p if p.get("object") == "chat.completion" else dialect.read(p) for p in parts]
    return {
        **said[0],
        "choices": [choice for part in said for choice in part["choices"]],
        "usage": said[0]["usage"] or {},
    }
