"""Hold what the gateway remembers of each attempt: order of calls, conversations, requests.

All of it is in memory and may be lost. After a restart, numbering continues from the store, client
retries are answered from it (client_retries.py), and prompts are rendered anew.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl_proxy.rendering.continuity import Branch, Conversations
from agentrl_proxy.requests.auth import ask
from agentrl_proxy.requests.speakers import COMPACTION

if TYPE_CHECKING:
    from agentrl_proxy.requests.client_retries import IdenticalRequests
    from agentrl_tracer.schemas import AttemptRef
    from agentrl_tracer.store import Store

QUIET_S = 5.0  # first check whether a quiet attempt is over; each later check waits twice as long


@dataclass(slots=True)
class Spent:
    """What an attempt has used of its budget."""

    calls: int
    tokens: int


@dataclass(slots=True)
class AttemptMemory:
    """The memory of one attempt."""

    attempt: AttemptRef
    next_seq: int | None = None
    used_at: float = 0.0
    patience: float = QUIET_S
    spent: Spent | None = None  # None: not read from the store yet
    conversations: Conversations = field(default_factory=Conversations)
    requests: dict[bytes, IdenticalRequests] = field(default_factory=dict[bytes, Any])
    """By ClientRequest.key: those that run, or failed and were not retried."""
    given_up: set[str] = field(default_factory=set[str])
    """Ids of requests that raised in the agent's process, or were canceled there."""
    compacted: dict[str | None, bool] = field(default_factory=dict[str | None, bool])
    """By agent that has called: whether a compaction was answered since its last answer."""

    def begins(self, agent: str | None, branched: Branch | None) -> Branch | None:
        """Return how an agent's call begins, where a compaction may be why it does not continue."""
        if agent == COMPACTION:
            return branched
        compacted = self.compacted.setdefault(agent, False)
        edited = branched in (Branch.NEW_CONVERSATION, Branch.HISTORY_EDITED)
        return Branch.COMPACTED if compacted and edited else branched

    def hear(self, agent: str | None) -> None:
        """Note that an agent was answered."""
        if agent == COMPACTION:
            self.compacted = dict.fromkeys(self.compacted, True)
        else:
            self.compacted[agent] = False

    async def take_seq(self, store: Store) -> int:
        """Return the next number in the order of acceptance; the store has the initial one."""
        if self.next_seq is None:
            begin = await ask(store, store.next_seq, self.attempt.attempt_id)
            if self.next_seq is None:  # no other request read it meanwhile
                self.next_seq = begin
        self.next_seq += 1
        return self.next_seq - 1


class AttemptMemories(dict[str, AttemptMemory]):
    """The memories of running attempts by id. Those that have ended are found by ``quiet``."""

    def of(self, attempt: AttemptRef) -> AttemptMemory:
        memory = self.get(attempt.attempt_id)
        if memory is None:
            memory = self[attempt.attempt_id] = AttemptMemory(attempt)
        memory.used_at = time.monotonic()
        memory.patience = QUIET_S
        return memory

    def quiet(self) -> list[str]:
        """Return attempts without a recent request: some of them may be over.

        An attempt that stays is returned again after twice the time.
        """
        now = time.monotonic()
        found: list[str] = []
        for attempt_id, memory in self.items():
            running = any(same.running for same in memory.requests.values())
            if memory.used_at + memory.patience < now and not running:
                memory.patience = 2 * (now - memory.used_at)
                found.append(attempt_id)
        return found
