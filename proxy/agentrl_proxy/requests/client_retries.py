"""What a client's marked retry is answered with: what the request that it repeats was told.

Knows what attempts remember while a gateway runs (asked.py), and what the store has of requests
that nobody remembers any more, because the gateway was restarted or too much came after. Does not
know who answers requests, nor routes.

In the store a request is recognised by itself: same attempt, same wire request, protocol, agent and
idempotency key. Its answer is the recorded one, said again, so a retry after a restart hears the
same ids, text and tool calls as one before. What a gateway left open when it died, or failed, is
sampled anew, once for each; a failure that was told only while its client may still come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agentrl_proxy.dependencies import GatewayStore
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.idempotency import RETRY_WITHIN_S, Asked, Part
from agentrl_proxy.requests.recording import agent_name
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import Call, CallState, PastCall

_LOOKING_AT_ONCE = 4  # after a restart many clients retry; the store has others to serve
_FAILED = (CallState.ERROR, CallState.CANCELLED)


@dataclass(slots=True)
class Identity:
    """By what a request is known to be the same as another: memory by ``key``, the store by the
    rest."""

    key: bytes
    raw: dict[str, Any]
    dialect: chat_objects.Dialect
    agent: str | None
    name: str | None  # its idempotency key
    prompts: int
    n: int  # choices per prompt


def identity(
    raw: dict[str, Any],
    body: bytes,
    dialect: chat_objects.Dialect,
    headers: Mapping[str, str],
    prompts: int,
    n: int,
) -> Identity:
    agent, name = agent_name(headers), headers.get("idempotency-key")
    # The same words in another protocol, or of another agent, are another request.
    whose = f"{dialect.id_prefix}{agent}\0{name or ''}\0".encode()
    key = blake2b(whose + body, digest_size=16).digest()
    return Identity(key, raw, dialect, agent, name, prompts, n)


class EarlierAnswers:
    """The answers that have been given, whichever service gave them."""

    def __init__(self, store: GatewayStore, attempts: AttemptMemories, stats: GatewayStats) -> None:
        self._store = store
        self._attempts = attempts
        self._stats = stats
        self._looking = asyncio.Semaphore(_LOOKING_AT_ONCE)

    async def find(self, same: Identity, caller: Caller) -> Asked | None:
        """What a marked retry repeats, see ``Requests.earlier``."""
        if caller.attempt is None:
            return None
        # The client closed the connection of the request that it repeats: let that be seen first.
        await asyncio.sleep(0)
        attempt_id = caller.attempt.attempt_id
        memory = self._attempts.get(attempt_id)
        if not _knows_all(memory, same.key):
            async with self._looking:  # in a thread: it may be many calls with long requests
                past = await asyncio.to_thread(self._store.same_requests, attempt_id, same.raw)
            if not _knows_all(memory, same.key):  # nobody else has looked meanwhile
                _recall(memory, past, same)
        asked = await memory.requests.earlier(same.key)
        self._stats.replayed += 0 if asked is None else len(asked.packed)
        return asked

    def begin(self, same: Identity, caller: Caller) -> Asked | None:
        """A request that is no retry of anything that is known; None: nobody's, not remembered."""
        if caller.attempt is None:
            return None
        return self._attempts.get(caller.attempt.attempt_id).requests.begin(same.key)

    def refused(self, asked: Asked | None, caller: Caller, *, comes_back: bool) -> None:
        if asked is not None and caller.attempt is not None:
            requests = self._attempts.get(caller.attempt.attempt_id).requests
            requests.refused(asked, comes_back=comes_back)


def _knows_all(memory: AttemptMemory, key: bytes) -> bool:
    """Whether there is nothing to be recalled of such requests."""
    requests = memory.requests
    return (memory.first_seq == 0 or requests.was_recalled(key)) and requests.knows(key)


def _recall(memory: AttemptMemory, past: Iterable[PastCall], same: Identity) -> None:
    """Gives memory back what the store has of such requests."""
    known = memory.requests.knows(same.key)
    requests: dict[str, list[PastCall]] = {}
    for one in past:
        call = one.call
        if memory.first_seq is not None and call.seq >= memory.first_seq and known:
            continue  # since this memory began: that is what it knows
        identical = (call.agent, call.params.get("idempotency_key")) == (same.agent, same.name)
        if identical and call.response_id.startswith(same.dialect.id_prefix):
            requests.setdefault(call.response_id, []).append(one)
    heard: list[list[Part]] = []
    missed: list[list[Part]] = []
    lately: list[list[Part]] = []
    unanswered: list[list[Part]] = []
    for calls in requests.values():
        if calls[0].call.params.get("client_retry") and [] in unanswered:
            unanswered.remove([])  # it was sampled in the place of one of these
        parts, whole = _parts([one.call for one in calls], same)
        if whole:
            before = memory.first_seq is None or calls[0].call.seq < memory.first_seq
            if any(one.continued for one in calls):
                heard.append(parts)
            elif before and all(map(_lately, calls)):
                lately.append(parts)
            else:
                missed.append(parts)
        elif any(one.call.state in _FAILED and _lately(one) for one in calls):
            unanswered.append(parts)
    # Whom an agent went on from has been heard: a retry asks rather for another, and for the last.
    told = [*heard, *missed]
    if unanswered:  # the retries are theirs
        told, lately = [*told, *lately], []
    memory.requests.recall(same.key, told, lately, unanswered)


def _lately(past: PastCall) -> bool:
    """Whether a client may still come back for it. Of one that was lost with its gateway nobody
    knows when that was."""
    ended_at = past.call.ended_at
    return ended_at is None or time.time() - ended_at < RETRY_WITHIN_S


def _parts(calls: Sequence[Call], same: Identity) -> tuple[list[Part], bool]:
    """What there is of a request's answer, a part for each of its jobs; and whether that is all.

    Of a job that failed our own model's choices that were whole are kept, and the others sampled
    anew. Somebody else's model is asked for all choices of a prompt at once, and of a choice that
    it never gave is an error recorded.
    """
    parts: list[Part] = []
    for seq in dict.fromkeys(call.seq for call in calls):
        rows = [call for call in calls if call.seq == seq]
        done = [row for row in rows if row.state is CallState.COMPLETED and row.response]
        if not done or (_is_theirs(rows[0]) and any(row.ended_at is None for row in rows)):
            continue
        said = [_said(row.response or {}, same.dialect) for row in done]
        choices = [choice for one in said for choice in one["choices"]]
        parts.append({**said[0], "choices": choices, "usage": said[0]["usage"] or {}})
    missing = chat_objects.missing(parts, same.prompts, same.n)
    if _is_theirs(calls[0]):
        return parts, all(len(choices) < same.n for choices in missing)
    return parts, not any(missing)


def _said(recorded: dict[str, Any], dialect: chat_objects.Dialect) -> Part:
    # Of other models the chat completion is recorded, whatever the protocol.
    return recorded if recorded.get("object") == "chat.completion" else dialect.read(recorded)


def _is_theirs(call: Call) -> bool:
    return not call.prompt_ids  # only our own sampler tells tokens
