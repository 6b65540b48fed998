"""A request as work: what is asked of a service, or what an earlier identical request was told.

Knows marked retries, and that one request may be several jobs whose answers are one. Does not know
protocols, tokens or sockets: services answer, dialects say the answer, ``asgi`` sends it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from agentrl_proxy import wire
from agentrl_proxy.asgi import Write
from agentrl_proxy.auth import Caller
from agentrl_proxy.errors import ApiError
from agentrl_proxy.life import Accepted

JobT = TypeVar("JobT", bound=Accepted)


class Service(Protocol):
    """What answers a request: our sampler, or somebody else's model."""

    async def accept(
        self, request: Any, body: bytes, caller: Caller, headers: Mapping[str, str], /
    ) -> Any: ...

    async def run(self, job: Any, write: Write | None, /) -> dict[str, Any]: ...


class EarlierAnswers(Protocol):
    """What knows the answers that this process has given, whichever service gave them."""

    async def earlier_answer(
        self, body: bytes, caller: Caller, headers: Mapping[str, str]
    ) -> dict[str, Any] | None: ...


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it has sent this same request before."""
    return headers.get("x-stainless-retry-count", "0") != "0"


class RequestWork(ABC, Generic[JobT]):
    """One request. A marked client retry gets an identical earlier one's answer, if there is one.

    Args:
        bodies: what retries find the answer of each job by.
    """

    def __init__(
        self,
        service: Service,
        answers: EarlierAnswers,
        dialect: wire.Dialect,
        bodies: Sequence[bytes],
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        self._service = service
        self._answers = answers
        self._dialect = dialect
        self._bodies = bodies
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
        responses = None if self._jobs else await self._earlier()
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

    async def _earlier(self) -> list[dict[str, Any]] | None:
        found = [
            await self._answers.earlier_answer(body, self._caller, self._headers)
            for body in self._bodies
        ]
        answers = [one for one in found if one is not None]
        return answers if len(answers) == len(found) else None


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
        super().__init__(service, answers, dialect, [body], caller, headers)
        self._request = request

    async def accept(self) -> None:
        (body,) = self._bodies
        job = await self._service.accept(self._request, body, self._caller, self._headers)
        self._jobs = [job]
