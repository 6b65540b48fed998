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

from agentrl_proxy import wire
from agentrl_proxy.asgi import Write
from agentrl_proxy.auth import Caller
from agentrl_proxy.errors import ApiError
from agentrl_proxy.life import Accepted
from agentrl_proxy.recording import agent_name, is_retry
from agentrl_proxy.retries import EarlierAnswers

JobT = TypeVar("JobT", bound=Accepted)


class Service(Protocol):
    """What answers a request: our sampler, or somebody else's model."""

    async def accept(
        self, request: Any, body: bytes, caller: Caller, headers: Mapping[str, str], /
    ) -> Any: ...

    async def run(self, job: Any, write: Write | None, /) -> dict[str, Any]: ...


class RequestWork(ABC, Generic[JobT]):
    """One request. A marked client retry gets an identical earlier one's answer, if there is one.

    Args:
        raw: the wire request.
        body: what retries find its answer by.
        prompts: how many jobs it is.
    """

    def __init__(
        self,
        service: Service,
        answers: EarlierAnswers,
        dialect: wire.Dialect,
        raw: dict[str, Any],
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
        prompts: int = 1,
    ) -> None:
        self._service = service
        self._answers = answers
        self._dialect = dialect
        self._raw = raw
        # The same words in another protocol, or of another agent, are another request.
        whose = f"{dialect.id_prefix}{agent_name(headers)}\0".encode()
        self._body = whose + body
        self._prompts = prompts
        self._caller = caller
        self._headers = headers
        self._jobs: list[JobT] = []
        self.is_retry = is_retry(headers)

    @abstractmethod
    async def accept(self) -> None:
        """Opens the rows of every job; everything that can be refused is refused here."""

    @property
    def keep_alone(self) -> bool:
        return any(job.wanted_by_retry for job in self._jobs)

    async def run(self, write: Write | None) -> dict[str, Any]:
        responses = None
        if not self._jobs:
            responses = await self._answers.find(
                self._raw, self._body, self._prompts, self._dialect, self._caller, self._headers
            )
        if responses is None:
            if not self._jobs:
                await self.accept()
            responses = await self._run(write)
        elif write is not None:
            for response in responses:
                for chunk in wire.replayed(self._dialect, response):
                    await write(chunk)
        return await self._say(responses, write)

    def failed(self, error: ApiError) -> bytes:
        return self._dialect.failed(error)

    async def _say(self, responses: list[dict[str, Any]], write: Write | None) -> dict[str, Any]:
        """The answer as one; what of a stream is still to be said is said."""
        (response,) = responses
        return self._dialect.whole(response) if write is None else response

    async def _run(self, write: Write | None) -> list[dict[str, Any]]:
        if len(self._jobs) == 1:
            return [await self._service.run(self._jobs[0], write)]
        try:
            async with asyncio.TaskGroup() as group:  # if one fails, no answer needs the others
                tasks = [group.create_task(self._service.run(job, write)) for job in self._jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


class OneJob(RequestWork[Accepted]):
    """A request that one service answers as a whole."""

    def __init__(
        self,
        service: Service,
        answers: EarlierAnswers,
        dialect: wire.Dialect,
        request: Any,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(service, answers, dialect, request.raw, body, caller, headers)
        self._request = request

    async def accept(self) -> None:
        job = await self._service.accept(self._request, self._body, self._caller, self._headers)
        self._jobs = [job]
