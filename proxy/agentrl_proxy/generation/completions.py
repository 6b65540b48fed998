"""Answer legacy ``/v1/completions`` requests: one job of ChatService for each prompt.

Knows how the prompts' jobs make one answer. The protocol's fields are in protocols/completions.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from agentrl_proxy.errors import ApiError
from agentrl_proxy.generation.service import BarePrompt, ChatService, Job
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.completions import CompletionDialect, CompletionRequest
from agentrl_proxy.requests.auth import Caller
from agentrl_proxy.requests.client_retries import EarlierAnswers
from agentrl_proxy.requests.idempotency import Asked
from agentrl_proxy.requests.lifecycle import Accepted
from agentrl_proxy.requests.work import RequestWork
from agentrl_proxy.server.sse import Write
from agentrl_tracer.ids import new_id

JobT = TypeVar("JobT", bound=Accepted)


class PromptsWork(RequestWork[JobT]):
    """Answers one request: a job per prompt, one answer for all."""

    _dialect: CompletionDialect

    async def _say(self, answer: dict[str, Any], write: Write | None) -> dict[str, Any]:
        if write is not None:
            await write(self._dialect.tail(answer))
        return await super()._say(answer, write)

    async def _accept_each(self, accepting: Iterable[Awaitable[JobT]]) -> None:
        """The answer is one: if there is no room for all of them, there is for none."""
        try:
            for one in accepting:
                self._jobs.append(await one)
        except BaseException:
            for job in self._jobs:
                await self._service.give_up(job)
            self._jobs = []
            raise


class CompletionWork(PromptsWork[Job]):
    """Our sampler's."""

    def __init__(
        self,
        service: ChatService,
        answers: EarlierAnswers,
        request: CompletionRequest,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> None:
        raw, prompts, n = request.common.raw, len(request.prompts), request.common.n
        super().__init__(
            service, answers, request.dialect, raw, body, caller, headers, prompts=prompts, n=n
        )
        self._chat = service
        self._request = request

    async def _accept(self, asked: Asked | None) -> None:
        request, common = self._request, self._request.common
        try:
            for ids in request.prompts:
                self._chat.room(len(ids))
        except ApiError as error:
            error.param = "prompt"
            raise
        finished = [] if asked is None else asked.parts()
        if finished:
            heading = chat_objects.heading_of(finished[0])
        else:
            heading = chat_objects.Heading(new_id(common.dialect.id_prefix), common.model)
        missing = chat_objects.missing(finished, len(request.prompts), common.n)
        bare = (
            BarePrompt(ids, heading, choices, request.scored)
            for ids, choices in zip(request.prompts, missing, strict=True)
            if choices
        )
        await self._accept_each(
            self._chat.accept(common, asked, self._caller, self._headers, one) for one in bare
        )
