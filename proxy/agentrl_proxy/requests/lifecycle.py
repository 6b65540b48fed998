"""Take a client's request from acceptance to its answer: accept, generate, record, answer.

A service (our sampler, or a provider's model) generates; a dialect writes the answer in the
client's protocol. This module ends the request when its client leaves, its store fails or its
attempt is sealed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

from agentrl_proxy.errors import ApiError, attempt_sealed, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests import client_retries
from agentrl_proxy.requests.attempts import AttemptMemory
from agentrl_proxy.requests.client_retries import Completion
from agentrl_proxy.requests.rate_limits import Admission
from agentrl_proxy.requests.recording import agent_name, is_retry, latest_state, request_id
from agentrl_proxy.requests.speakers import speaker_of
from agentrl_proxy.server.sse import Write
from agentrl_tracer.schemas import AttemptState, CallState, new_id
from agentrl_tracer.store.faults import unexpected

log = logging.getLogger("agentrl.proxy")


@dataclass(slots=True)
class OpenCall:
    """An accepted part of a request: its rows are open in the store."""

    client: ClientRequest
    error: str = field(default="", init=False)  # why ``generate`` failed, as it is recorded


class Service(Protocol):
    """Generates answers. A ``part`` is a request, or one of its prompts."""

    async def accept(self, part: Any, client: ClientRequest, /) -> Any:
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


@dataclass(eq=False, slots=True)
class ClientRequest:
    """A client's request in one or more parts, a part for each prompt.

    The parts share one answer: if one is refused or fails, the request fails, and no choice of it
    trains. Only a durable answer may leave.
    """

    admission: Admission
    service: Service
    parts: Sequence[Any]
    sampled: int  # choices for our sampler; 0: a provider's model answers
    raw: dict[str, Any]
    size: int  # of the body, in bytes
    digest: InitVar[bytes]  # of the body
    headers: Mapping[str, str]
    memory: AttemptMemory | None  # of the attempt that sent it; None: outside rollouts
    large: bool = False  # see server/large_requests.py
    dialect: chat_objects.Dialect = field(init=False)
    agent: str | None = field(init=False)
    key: bytes = field(init=False)
    """What identical requests share: body, protocol, agent and idempotency key."""
    heading: chat_objects.Heading = field(init=False)  # of the answer to all parts
    answer: asyncio.Future[Completion | None] = field(
        default_factory=asyncio.Future[Any], init=False
    )
    """Resolves once the answer is durable; None if the request failed."""
    answered: str | None = field(default=None, init=False)  # the id of the answer that it got
    replayed: bool = field(default=False, init=False)  # the answer is another request's
    left: bool = field(default=False, init=False)  # the client left while the answer was recorded
    waiting: int = field(default=0, init=False)
    """Client retries that wait for the answer. While there are any, the request outlives its own
    client."""
    commits: ClassVar[set[asyncio.Task[Any]]] = set()  # kept until they end

    def __post_init__(self, digest: bytes) -> None:
        part, rules = self.parts[0], self.admission.deps.speakers
        self.dialect, self.agent = part.dialect, agent_name(self.headers)
        if self.agent is None and rules:
            self.agent = speaker_of(rules, part, self.headers, self.raw["model"])
        name = self.headers.get("idempotency-key", "")
        said = f"{self.dialect.id_prefix}{self.agent}\0{name}\0".encode()
        self.key = blake2b(said + digest, digest_size=16).digest()

    async def run(self, write: Write | None) -> Any:
        """Return the answer as one JSON body, or send it as chunks through ``write``.

        Raises:
            ApiError: it was refused or failed; fields are named as in the client's protocol.
            asyncio.CancelledError: the client left. What was sampled is recorded.
        """
        dialect = self.dialect
        try:
            answer = None
            if is_retry(self.headers):
                answer = await client_retries.find(self)
            if answer is None:
                answer, last_chunks = await self._sample(write)
            else:
                self.replayed = True
                self.admission.stats.replayed += 1
                last_chunks = [] if write is None else [*chat_objects.replayed(dialect, answer)]
        except ApiError as error:
            error.rename(dialect.names)
            raise
        self.answered = answer["id"]
        if write is None:
            return dialect.whole(answer)
        await write(b"".join([*last_chunks, dialect.end(answer)]))
        return answer

    async def note_delivery(self, *, delivered: bool) -> None:
        """Record whether the client got the answer, unless the rows say so already."""
        memory, store = self.memory, self.admission.deps.store
        if memory is None or self.answered is None:
            return
        of = memory.attempt.attempt_id
        mine = request_id(self.headers) or (new_id() if self.replayed else self.answered)
        delivered = delivered and mine not in memory.given_up
        try:
            if not delivered:
                self.admission.stats.undelivered += 1
                await asyncio.to_thread(store.mark_undelivered, of, [mine])
            elif self.replayed:
                await asyncio.to_thread(store.mark_delivered, of, self.answered, mine)
        except Exception as error:
            said = "the store did not take whether %s was delivered: %s"
            log.error(said, self.answered, error, exc_info=unexpected(error))

    async def take_turn(self, choices: int, prompt_tokens: int) -> tuple[int | None, int]:
        """Charge the attempt's budget for a part, and number it.

        Returns:
            How many tokens each choice may sample (None: no limit), and the part's place in the
            attempt's order of calls (0 outside rollouts).

        Raises:
            ApiError: 429: the budget is used up.
        """
        if self.memory is None:
            return None, 0
        room = await self.admission.within_budget(self.memory, choices, prompt_tokens)
        return room, await self.memory.take_seq(self.admission.deps.store)

    async def _sample(self, write: Write | None) -> tuple[Completion, list[bytes]]:
        """Return a durable answer and the chunks that have not left."""
        admission, calls, since, answered = self.admission, list[Any](), None, False
        places = (len(self.parts), self.sampled)
        client_retries.begin(self)
        admission.stats.in_flight += 1
        try:
            try:
                since = admission.enter(*places)
                responses = await self._generate(calls, write)
            except BaseException as error:
                may_retry = not isinstance(error, ApiError) or error.may_pass
                client_retries.end(self, None, may_retry=may_retry)
                raise
            pairs = list(zip(calls, responses, strict=True))
            answer = chat_objects.together(responses)
            await self._commit(pairs, answer)
            admission.stats.completed += 1
            answered = True
        finally:
            admission.stats.in_flight -= 1
            if since is not None:
                admission.leave(*places, since, answered=answered)
        if write is None:
            return answer, []
        return answer, [chunk for pair in pairs for chunk in self.service.last_chunks(*pair)]

    async def _generate(self, calls: list[Any], write: Write | None) -> list[Completion]:
        """Accept and answer all parts. If one fails, stop the others and record them as failed."""
        service, stats, accepted = self.service, self.admission.stats, False
        self.heading = chat_objects.Heading(new_id(self.dialect.id_prefix), self.raw["model"])
        try:
            for part in self.parts:
                calls.append(await service.accept(part, self))
            accepted = True
            if len(calls) == 1:
                return [await service.generate(calls[0], write)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.generate(call, write)) for call in calls]
            return [task.result() for task in tasks]
        except asyncio.CancelledError:
            stats.cancelled += accepted
            await self._close(calls, CallState.CANCELLED)
            raise
        except Exception as error:
            stats.failed += accepted
            what = "failed" if accepted else "was refused"
            await self._close(calls, CallState.ERROR, f"another prompt of the request {what}")
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error from None

    async def _commit(self, pairs: list[tuple[Any, Completion]], answer: Completion) -> None:
        """Record the answer. A client that leaves now does not stop it: its retry gets the answer.

        Raises:
            ApiError: the store failed (503), or the attempt was sealed meanwhile (409).
        """
        stats = self.admission.stats

        async def record() -> AttemptState | None:
            durable = None
            try:
                state = await latest_state(
                    [self.service.record(call, CallState.COMPLETED, said) for call, said in pairs]
                )
                if self.memory is None or state is AttemptState.RUNNING:
                    for call, said in pairs:
                        self.service.answered(call, said)
                    durable, self.answered = answer, answer["id"]
                return state
            finally:
                client_retries.end(self, durable)
                if self.left:
                    await self.note_delivery(delivered=False)

        commit = asyncio.create_task(record())
        self.commits.add(commit)
        commit.add_done_callback(self.commits.discard)
        try:
            state = await asyncio.shield(commit)
        except asyncio.CancelledError:
            stats.cancelled += 1
            self.left = True
            raise
        except Exception as error:
            stats.failed += 1
            said = "the store did not take %s: %s"
            log.error(said, answer["id"], error, exc_info=unexpected(error))
            raise unavailable("the answer could not be recorded", "store_error") from error
        if self.memory is not None and state is not AttemptState.RUNNING:
            stats.late += 1
            raise attempt_sealed(state)

    async def _close(self, calls: Sequence[Any], state: CallState, error: str = "") -> None:
        """Record what there is of parts that will not be answered."""
        if not calls:
            return
        for call in calls:
            call.error = call.error or error
        try:
            await asyncio.shield(latest_state([self.service.record(call, state) for call in calls]))
        except Exception as failure:  # the client is told of the first one, the log of both
            said = "the store did not take %s (%s): %s"
            log.error(said, self.heading.id, state, failure, exc_info=unexpected(failure))
