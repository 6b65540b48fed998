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
from typing import Any, ClassVar, Protocol

from agentrl_proxy.errors import ApiError, attempt_sealed, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.attempts import AttemptMemory
from agentrl_proxy.requests.client_retries import ClientRetries, Completion, TrackedRequest
from agentrl_proxy.requests.rate_limits import Slot
from agentrl_proxy.requests.recording import is_retry, latest_state
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import AttemptRef, AttemptState, CallState

log = logging.getLogger("agentrl.proxy")


@dataclass(slots=True)
class OpenCall:
    """An accepted request, or one of its prompts: its rows are open in the store."""

    attempt: AttemptRef | None  # of the client that sent it
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
        attempt: AttemptRef | None,
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


@dataclass(eq=False)
class ClientRequest:
    """A client's request in one or more parts, a part for each prompt.

    The parts share one answer: if one is refused or fails, the request fails, and no choice of it
    trains. Only a durable answer may leave.
    """

    retries: ClientRetries
    stats: GatewayStats
    service: Service
    parts: Sequence[Any]
    request: TrackedRequest
    attempt: AttemptRef | None
    headers: Mapping[str, str]
    commits: ClassVar[set[asyncio.Task[Any]]] = set()  # kept until they end

    @property
    def keep_alone(self) -> bool:
        """Whether a retry waits for the answer, so that the request outlives its own client."""
        return self.request.waiting > 0

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after an error."""
        return self.request.dialect.failed(error)

    async def run(self, write: Write | None) -> Any:
        """Return the answer as one JSON body, or send it as chunks through ``write``.

        Raises:
            ApiError: it was refused or failed; fields are named as in the client's protocol.
            asyncio.CancelledError: the client left. What was sampled is recorded.
        """
        dialect = self.request.dialect
        try:
            answer = None
            if is_retry(self.headers):
                answer = await self.retries.find(self.request, self.attempt)
            if answer is None:
                answer, last_chunks = await self._sample(write)
            else:
                self.stats.replayed += 1
                last_chunks = [] if write is None else [*chat_objects.replayed(dialect, answer)]
        except ApiError as error:
            error.rename(dialect.names)
            raise
        if write is None:
            return dialect.whole(answer)
        await write(b"".join([*last_chunks, dialect.end(answer)]))
        return answer

    async def _sample(self, write: Write | None) -> tuple[Completion, list[bytes]]:
        """Return a durable answer and the chunks that have not left."""
        attempt, calls = self.attempt, list[Any]()
        memory = None if attempt is None else self.retries.attempts.get(attempt.attempt_id)
        self.retries.begin(self.request, memory)
        self.stats.in_flight += 1
        if memory is not None:
            memory.in_flight += 1
        try:
            try:
                responses = await self._generate(calls, write)
            except BaseException as error:
                may_retry = not isinstance(error, ApiError) or error.may_pass
                self.retries.end(self.request, memory, None, may_retry=may_retry)
                raise
            pairs = list(zip(calls, responses, strict=True))
            answer = chat_objects.together(responses)
            await self._commit(pairs, answer, memory)
            for call in calls:
                call.slot.leave(answered=True)
            self.stats.completed += 1
        finally:
            for call in calls:
                call.slot.leave()
            self.stats.in_flight -= 1
            if memory is not None:
                memory.in_flight -= 1
        if write is None:
            return answer, []
        return answer, [chunk for pair in pairs for chunk in self.service.last_chunks(*pair)]

    async def _generate(self, calls: list[Any], write: Write | None) -> list[Completion]:
        """Accept and answer all parts. If one fails, stop the others and record them as failed."""
        request, service = self.request, self.service
        heading = chat_objects.Heading(new_id(request.dialect.id_prefix), request.raw["model"])
        accepted = False
        try:
            for part in self.parts:
                calls.append(await service.accept(part, heading, self.attempt, self.headers))
            accepted = True
            if len(calls) == 1:
                return [await service.generate(calls[0], write)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.generate(call, write)) for call in calls]
            return [task.result() for task in tasks]
        except asyncio.CancelledError:
            self.stats.cancelled += accepted
            await self._close(calls, CallState.CANCELLED)
            raise
        except Exception as error:
            self.stats.failed += accepted
            what = "failed" if accepted else "was refused"
            await self._close(calls, CallState.ERROR, f"another prompt of the request {what}")
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error from None

    async def _commit(
        self, pairs: list[tuple[Any, Completion]], answer: Completion, memory: AttemptMemory | None
    ) -> None:
        """Record the answer. A client that leaves now does not stop it: its retry gets the answer.

        Raises:
            ApiError: the store failed (503), or the attempt was sealed meanwhile (409).
        """
        attempt = self.attempt

        async def record() -> AttemptState | None:
            durable = None
            try:
                state = await latest_state(
                    [self.service.record(call, CallState.COMPLETED, said) for call, said in pairs]
                )
                if attempt is None or state is AttemptState.RUNNING:
                    for call, said in pairs:
                        self.service.answered(call, said)
                    durable = answer
                return state
            finally:
                self.retries.end(self.request, memory, durable)

        commit = asyncio.create_task(record())
        self.commits.add(commit)
        commit.add_done_callback(self.commits.discard)
        try:
            state = await asyncio.shield(commit)
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        except Exception as error:
            self.stats.failed += 1
            log.exception("the store did not take %s", answer["id"])
            raise unavailable("the answer could not be recorded", "store_error") from error
        if attempt is not None and state is not AttemptState.RUNNING:
            self.stats.late += 1
            self.retries.attempts.forget(attempt.attempt_id)
            raise attempt_sealed(state)

    async def _close(self, calls: Sequence[Any], state: CallState, error: str = "") -> None:
        """Record what there is of parts that will not be answered."""
        for call in calls:
            call.slot.leave()
            call.error = call.error or error
        if not calls:
            return
        try:
            await asyncio.shield(latest_state([self.service.record(call, state) for call in calls]))
        except Exception:  # the client is told of the first failure, the log of both
            log.exception("the store did not take %s (%s)", calls[0].heading.id, state)
