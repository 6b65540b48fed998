"""A request as work: what is asked of a service, or what an earlier identical request was told.

Knows that a marked retry is given what was answered before, and that one request may be several
jobs whose answers are one. Does not know protocols, tokens or sockets: services answer, dialects
say the answer, ``asgi`` sends it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from agentrl_proxy.errors import ApiError
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.client_retries import EarlierAnswers, identity
from agentrl_proxy.requests.idempotency import Asked, Part, State
from agentrl_proxy.requests.lifecycle import Accepted
from agentrl_proxy.requests.recording import is_retry
from agentrl_proxy.server.sse import Write

JobT = TypeVar("JobT", bound=Accepted)


class Service(Protocol):
    """What answers a request: our sampler, or somebody else's model."""

    async def accept(
        self, request: Any, asked: Asked | None, caller: Caller, headers: Mapping[str, str], /
    ) -> Any: ...

    async def run(self, job: Any, write: Write | None, /) -> dict[str, Any]: ...

    async def give_up(self, job: Any, /) -> None: ...


class RequestWork(ABC, Generic[JobT]):
    """One request. A marked client retry gets an identical earlier one's answer, if there is one;
    of one that failed it gets the choices that were whole, and the others are sampled.

    Args:
        raw: the wire request.
        body: its bytes.
        prompts: each is a job.
        n: choices per prompt.
    """

    def __init__(
        self,
        service: Service,
        answers: EarlierAnswers,
        dialect: chat_objects.Dialect,
        raw: dict[str, Any],
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
        *,
        prompts: int = 1,
        n: int,
    ) -> None:
        self._service = service
        self._answers = answers
        self._dialect = dialect
        self._same = identity(raw, body, dialect, headers, prompts, n)
        self._caller = caller
        self._headers = headers
        self._jobs: list[JobT] = []
        self.is_retry = is_retry(headers)

    async def accept(self, asked: Asked | None = None) -> None:
        """Opens the rows of every job; everything that can be refused is refused here.

        Args:
            asked: the request that failed, if this is its retry.
        """
        if asked is None:
            asked = self._answers.begin(self._same, self._caller)
        try:
            await self._accept(asked)
        except BaseException as error:
            comes_back = not isinstance(error, ApiError) or error.may_pass
            self._answers.refused(asked, self._caller, comes_back=comes_back)
            if isinstance(error, ApiError):
                error.rename(self._dialect.names)
            raise
        if asked is not None:
            asked.jobs = len(self._jobs)

    @abstractmethod
    async def _accept(self, asked: Asked | None) -> None:
        """Makes the jobs of what ``asked`` has no parts of; of all, or none."""

    @property
    def keep_alone(self) -> bool:
        return any(job.wanted_by_retry for job in self._jobs)

    async def run(self, write: Write | None) -> dict[str, Any]:
        parts: list[Part] = []
        if not self._jobs:  # not accepted yet: a retry
            asked = await self._answers.find(self._same, self._caller)
            parts = [] if asked is None else asked.parts()
            if asked is None or asked.state is State.RUNNING:
                await self.accept(asked)
        if write is not None:
            for part in parts:
                for chunk in chat_objects.replayed(self._dialect, part):
                    await write(chunk)
        try:
            parts = [*parts, *await self._run(write)]
        except ApiError as error:
            error.rename(self._dialect.names)
            raise
        together = chat_objects.together(parts, self._same.n)
        if write is not None and not self._jobs:
            await write(self._dialect.end(together))
        return await self._say(together, write)

    def failed(self, error: ApiError) -> bytes:
        return self._dialect.failed(error)

    async def _say(self, answer: dict[str, Any], write: Write | None) -> dict[str, Any]:
        """The whole answer; what of a stream is still to be said is said."""
        return self._dialect.whole(answer) if write is None else answer

    async def _run(self, write: Write | None) -> list[Part]:
        if len(self._jobs) == 1:
            return [await self._service.run(self._jobs[0], write)]
        failed: list[ApiError] = []

        async def run(job: JobT) -> Part | None:
            try:
                return await self._service.run(job, write)
            except ApiError as error:
                if not error.may_pass:
                    raise  # no answer needs the others
                failed.append(error)  # the retry will need the others
                return None

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(job)) for job in self._jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if failed:
            raise failed[0]
        return [part for task in tasks if (part := task.result()) is not None]


class OneJob(RequestWork[Accepted]):
    """A request that one service answers as a whole."""

    def __init__(
        self,
        service: Service,
        answers: EarlierAnswers,
        dialect: chat_objects.Dialect,
        request: Any,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(service, answers, dialect, request.raw, body, caller, headers, n=request.n)
        self._request = request

    async def _accept(self, asked: Asked | None) -> None:
        job = await self._service.accept(self._request, asked, self._caller, self._headers)
        self._jobs = [job]
