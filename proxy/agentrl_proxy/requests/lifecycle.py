"""The life of an accepted request, whoever answers it: under way, recorded, answered or given up.

Knows what an accepted request holds (its place, its row's writing, who waits for its answer) and
what becomes of it when its client leaves, its store fails or its attempt was sealed. Does not know
who makes the answer, or how.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.errors import attempt_sealed, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.idempotency import Asked
from agentrl_proxy.requests.rate_limits import Slot
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import AttemptState, CallState

log = logging.getLogger("agentrl.proxy")

Recording = Coroutine[Any, Any, AttemptState | None]
"""Makes the rows of a request durable; gives the state of its attempt as of that commit."""


@dataclass(slots=True)
class Accepted:
    """An accepted request: its rows are open."""

    caller: Caller
    memory: AttemptMemory | None
    asked: Asked | None  # the request of which this is a job; with a memory always
    heading: chat_objects.Heading
    slot: Slot  # its place among those being answered
    committing: bool = field(default=False, init=False)
    """Its client left, and its rows are on their way to the store."""
    ended: bool = field(default=False, init=False)
    """Retries wait for it no more."""

    @property
    def wanted_by_retry(self) -> bool:
        return self.asked is not None and self.asked.waiting > 0


class CallLife:
    """Counts, records and ends accepted requests."""

    def __init__(self, attempts: AttemptMemories, stats: GatewayStats) -> None:
        self._attempts = attempts
        self._stats = stats
        self._alone = set[asyncio.Task[AttemptState | None]]()  # commits whose clients left

    async def run(
        self, job: Accepted, answering: Coroutine[Any, Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Awaits the answer. However that ends, nothing of the request stays under way."""
        self._stats.in_flight += 1
        if job.memory is not None:
            job.memory.in_flight += 1
        try:
            response = await answering
            self._leave(job, answered=True)
        except BaseException:
            if not job.committing:
                self._end(job, whole=False)
            raise
        finally:
            self._leave(job)
            self._stats.in_flight -= 1
            if job.memory is not None:
                job.memory.in_flight -= 1
        self._stats.completed += 1
        return response

    async def commit(
        self,
        job: Accepted,
        recording: Recording,
        response: dict[str, Any],
        remember: Callable[[], None] | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """Records an answer: after this it is durable, may leave, and is what retries get.

        Args:
            remember: what else is to be done once the answer is durable.
            whole: all that the job was to make; else a retry samples what is missing.

        Raises:
            ApiError: it is not (503), or came after its attempt was sealed (409).
            asyncio.CancelledError: the client left in the last moment. The commit goes on, and
                the answer waits for the client's retry: sampled again, it would train twice.
        """
        commit = asyncio.create_task(self._commit(job, recording, response, remember, whole))
        try:
            state = await asyncio.shield(commit)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            self._leave_alone(job, commit)
            raise
        except Exception as error:
            self._stats.failed += 1
            log.exception("the store did not take %s", job.heading.id)
            raise unavailable("the answer could not be recorded", "store_error") from error
        attempt = job.caller.attempt
        if attempt is not None and state is not AttemptState.RUNNING:
            self._stats.late += 1
            self._attempts.forget(attempt.attempt_id)
            raise attempt_sealed(state)

    async def close(self, job: Accepted, state: CallState, recording: Recording) -> None:
        """Records what there is of an answer that will not be whole."""
        if state is CallState.CANCELLED:
            self._stats.cancelled += 1
        else:
            self._stats.failed += 1
        await self._record_end(job, state, recording)

    async def give_up(self, job: Accepted, recording: Recording) -> None:
        """Ends a request that will not be run at all."""
        self._leave(job)
        await self._record_end(job, CallState.ERROR, recording)

    async def _commit(
        self,
        job: Accepted,
        recording: Recording,
        response: dict[str, Any],
        remember: Callable[[], None] | None,
        whole: bool,
    ) -> AttemptState | None:
        state = await recording
        if job.memory is not None and job.asked is not None and state is AttemptState.RUNNING:
            if remember is not None:
                remember()
            job.asked.add(response)
            if whole:
                self._end(job, whole=True)
        return state

    def _leave_alone(self, job: Accepted, commit: asyncio.Task[AttemptState | None]) -> None:
        """Nobody waits for this commit any more, but a retry may."""

        def ended(commit: asyncio.Task[AttemptState | None]) -> None:
            self._alone.discard(commit)
            if not commit.cancelled() and commit.exception() is not None:
                log.error("the store did not take %s", job.heading.id, exc_info=commit.exception())
            self._end(job, whole=False)  # unless it is durable

        job.committing = True
        self._alone.add(commit)
        commit.add_done_callback(ended)

    async def _record_end(self, job: Accepted, state: CallState, recording: Recording) -> None:
        try:
            await asyncio.shield(recording)
        except Exception:  # the client hears of the first failure, the log of both
            log.exception("the store did not take %s (%s)", job.heading.id, state)

    @staticmethod
    def _leave(job: Accepted, *, answered: bool = False) -> None:
        job.slot.leave(answered=answered)

    @staticmethod
    def _end(job: Accepted, *, whole: bool) -> None:
        if job.asked is not None and job.memory is not None and not job.ended:
            job.memory.requests.job_ended(job.asked, whole=whole)
        job.ended = True
