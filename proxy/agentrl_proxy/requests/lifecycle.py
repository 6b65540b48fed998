"""Take a client's request from acceptance to its answer: accept, generate, record, answer.

A service (our sampler, or a provider's model) generates; a dialect writes the answer in the
client's protocol. This module ends the request when its client leaves, its store fails or its
attempt is sealed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_proxy.errors import ApiError, attempt_sealed, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory, RunningRequest
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.client_retries import ClientRetries, Completion, RequestIdentity
from agentrl_proxy.requests.rate_limits import Slot
from agentrl_proxy.requests.recording import is_retry, latest_state
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import AttemptState, CallState

log = logging.getLogger("agentrl.proxy")


@dataclass(slots=True)
class OpenCall:
    """An accepted request, or one of its prompts: its rows are open in the store."""

    caller: Caller
    memory: AttemptMemory | None
    heading: chat_objects.Heading  # shared by all prompts of a request
    slot: Slot
    error: str = field(default="", init=False)  # why ``generate`` failed, as it is recorded


class Service(Protocol):
    """Generates answers. A ``part`` is a request, or one of its prompts."""

    async def accept(
        self,
        part: Any,
        heading: chat_objects.Heading,
        caller: Caller,
        headers: Mapping[str, str],
        /,
    ) -> Any:
        """Open the rows of a part and return its OpenCall.

        Raises:
            ApiError: the part is refused. Then it has no row.
        """
        ...

    async def generate(self, call: Any, write: Write | None, /) -> Completion:
        """Make the answer. With ``write``, chunks leave as they are made, except the last ones.

        Raises:
            ApiError: generation failed; ``call.error`` says how.
        """
        ...

    async def record(
        self, call: Any, state: CallState, response: Completion | None = None, /
    ) -> AttemptState | None:
        """Make the rows durable. Return the attempt's state as of that commit."""
        ...

    def answered(self, call: Any, response: Completion, /) -> None:
        """Do what remains once the answer is durable. Must not raise."""
        ...

    def last_chunks(self, call: Any, response: Completion, /) -> list[bytes]:
        """The chunks that a stream must not have before its answer is durable."""
        ...


class RequestLifecycle:
    """What the requests of a gateway share."""

    def __init__(
        self, retries: ClientRetries, attempts: AttemptMemories, stats: GatewayStats
    ) -> None:
        self.retries = retries
        self.attempts = attempts
        self.stats = stats
        self.commits = set[asyncio.Task[AttemptState | None]]()  # whose clients have left


class ClientRequest:
    """A client's request in one or more parts, a part for each prompt.

    The parts share one answer: if one is refused or fails, the request fails, and no choice of it
    trains. Only a durable answer may leave.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        service: Service,
        parts: Sequence[Any],
        identity: RequestIdentity,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        self._lifecycle = lifecycle
        self._stats = lifecycle.stats
        self._service = service
        self._parts = parts
        self._identity = identity
        self._dialect = identity.dialect
        self._caller = caller
        self._headers = headers
        self._running: RunningRequest | None = None

    @property
    def keep_alone(self) -> bool:
        """Whether a retry waits for the answer, so that the request outlives its own client."""
        return self._running is not None and self._running.waiting > 0

    def failed(self, error: ApiError) -> bytes:
        return self._dialect.failed(error)

    async def run(self, write: Write | None) -> Any:
        """Return the answer as one JSON body, or send it as chunks through ``write``.

        Raises:
            ApiError: it was refused or failed; fields are named as in the client's protocol.
            asyncio.CancelledError: the client left. What was sampled is recorded.
        """
        try:
            if is_retry(self._headers):
                answer = await self._lifecycle.retries.find(self._identity, self._caller)
                if answer is not None:
                    return await self._replay(answer, write)
            return await self._sample(write)
        except ApiError as error:
            error.rename(self._dialect.names)
            raise

    async def _replay(self, answer: Completion, write: Write | None) -> Any:
        self._stats.replayed += 1
        if write is None:
            return self._dialect.whole(answer)
        for chunk in chat_objects.replayed(self._dialect, answer):
            await write(chunk)
        await write(self._dialect.end(answer))
        return answer

    async def _sample(self, write: Write | None) -> Any:
        retries, attempt = self._lifecycle.retries, self._caller.attempt
        memory = None if attempt is None else self._lifecycle.attempts.get(attempt.attempt_id)
        running = self._running = retries.begin(self._identity, memory)
        calls: list[OpenCall] = []
        self._stats.in_flight += 1
        if memory is not None:
            memory.in_flight += 1
        try:
            try:
                await self._accept(calls)
                responses = await self._generate(calls, write)
            except BaseException as error:
                retried = not isinstance(error, ApiError) or error.may_pass
                retries.end(running, None, retried=retried)
                raise
            answer = chat_objects.together(responses)
            await self._commit(running, calls, responses, answer)
            for call in calls:
                call.slot.leave(answered=True)
            self._stats.completed += 1
        finally:
            for call in calls:
                call.slot.leave()
            self._stats.in_flight -= 1
            if memory is not None:
                memory.in_flight -= 1
        if write is None:
            return self._dialect.whole(answer)
        pairs = zip(calls, responses, strict=True)
        chunks = [chunk for pair in pairs for chunk in self._service.last_chunks(*pair)]
        await write(b"".join([*chunks, self._dialect.end(answer)]))
        return answer

    async def _accept(self, calls: list[OpenCall]) -> None:
        heading = chat_objects.Heading(new_id(self._dialect.id_prefix), self._identity.raw["model"])
        try:
            for part in self._parts:
                calls.append(await self._service.accept(part, heading, self._caller, self._headers))
        except BaseException:
            await self._close(calls, CallState.ERROR, "another prompt of the request was refused")
            raise

    async def _generate(self, calls: list[OpenCall], write: Write | None) -> list[Completion]:
        """Generate all parts. If one fails, the others are stopped and recorded as failed."""
        try:
            if len(calls) == 1:
                return [await self._service.generate(calls[0], write)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._service.generate(c, write)) for c in calls]
            return [task.result() for task in tasks]
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            await self._close(calls, CallState.CANCELLED)
            raise
        except (ApiError, BaseExceptionGroup) as error:
            self._stats.failed += 1
            await self._close(calls, CallState.ERROR, "another prompt of the request failed")
            raise error if isinstance(error, ApiError) else error.exceptions[0] from None

    async def _commit(
        self,
        running: RunningRequest,
        calls: list[OpenCall],
        responses: list[Completion],
        answer: Completion,
    ) -> None:
        """Record the answer. A client that leaves now does not stop it: its retry gets the answer.

        Raises:
            ApiError: the store failed (503), or the attempt was sealed meanwhile (409).
        """
        record = self._record(running, calls, responses, answer)
        commit = asyncio.create_task(record)
        try:
            state = await asyncio.shield(commit)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            self._lifecycle.commits.add(commit)
            commit.add_done_callback(self._left_commit_ended)
            raise
        except Exception as error:
            self._stats.failed += 1
            log.exception("the store did not take %s", calls[0].heading.id)
            raise unavailable("the answer could not be recorded", "store_error") from error
        attempt = self._caller.attempt
        if attempt is not None and state is not AttemptState.RUNNING:
            self._stats.late += 1
            self._lifecycle.attempts.forget(attempt.attempt_id)
            raise attempt_sealed(state)

    async def _record(
        self,
        running: RunningRequest,
        calls: list[OpenCall],
        responses: list[Completion],
        answer: Completion,
    ) -> AttemptState | None:
        durable = None
        try:
            pairs = list(zip(calls, responses, strict=True))
            state = await latest_state(
                [self._service.record(call, CallState.COMPLETED, said) for call, said in pairs]
            )
            if self._caller.attempt is None or state is AttemptState.RUNNING:
                for call, said in pairs:
                    self._service.answered(call, said)
                durable = answer
            return state
        finally:
            self._lifecycle.retries.end(running, durable)

    def _left_commit_ended(self, commit: asyncio.Task[AttemptState | None]) -> None:
        self._lifecycle.commits.discard(commit)
        if not commit.cancelled() and commit.exception() is not None:
            log.error("the store did not take an answer", exc_info=commit.exception())

    async def _close(self, calls: Sequence[OpenCall], state: CallState, error: str = "") -> None:
        """Record what there is of parts that will not be answered."""
        for call in calls:
            call.slot.leave()
            call.error = call.error or error
        if not calls:
            return
        try:
            await asyncio.shield(
                latest_state([self._service.record(call, state) for call in calls])
            )
        except Exception:  # the client is told of the first failure, the log of both
            log.exception("the store did not take %s (%s)", calls[0].heading.id, state)
