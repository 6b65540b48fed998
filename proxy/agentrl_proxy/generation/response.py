"""Generate the response of an accepted call: sample its choices, parse and describe them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import (
    ApiError,
    invalid,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.generation.choices import Choice
from agentrl_proxy.generation.streaming import ChoiceReader, ChoiceStream
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.continuity import (
    Prompt,
)
from agentrl_proxy.rendering.structured_output import Constraint
from agentrl_proxy.rendering.tool_call_parser import Parser, PlainTextParser
from agentrl_proxy.requests.lifecycle import OpenCall
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    PromptScorer,
    RefusedError,
)
from agentrl_proxy.server.sse import Write
from agentrl_tracer.schemas import Call

log = logging.getLogger("agentrl.proxy")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """One prompt of a text completion: tokens to continue. Its answer is plain text."""

    request: ChatRequest  # what all prompts of the request share; it has no messages
    ids: list[int]
    first_choice: int  # index in the response
    scored: bool  # the answer has the log-probs of the prompt's tokens, too


@dataclass(slots=True)
class SampledCall(OpenCall):
    """An accepted request to our sampler, or one of its prompts."""

    request: ChatRequest
    prompt: Prompt
    params: DecodingParams
    constraint: Constraint | None
    adapter: str | None
    one_call: bool  # the answer ends where a second tool call begins
    scorer: PromptScorer | None  # of the prompt's own tokens
    rows: list[Call] = field(default_factory=list[Call])
    choices: list[Choice] = field(default_factory=list[Choice])

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)


class ResponseGenerator:
    """Generates responses with the gateway's sampler and renderer."""

    def __init__(self, deps: GatewayDependencies) -> None:
        self._deps = deps
        self._renderer = deps.renderer

    async def generate(self, call: SampledCall, write: Write | None) -> dict[str, Any]:
        """Return a chat completion. With ``write``, all chunks but the last ones leave already.

        Raises:
            ApiError: the sampler refused or failed; ``call.error`` says how.
        """
        try:
            return await self._generate(call, write)
        except Exception as error:
            refusal = _refusal(call, error)
            said = refusal.message if error is refusal else f"{type(error).__name__}: {error}"
            call.error = said.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
            if refusal.code == "sampler_error" and error is not refusal:
                log.exception("sampling failed for %s", call.heading.id)
            raise refusal from None

    async def _generate(self, call: SampledCall, write: Write | None) -> dict[str, Any]:
        renderer, request = self._renderer, call.request
        call.choices = [self._choice(call, row.choice, write) for row in call.rows]
        scores = None if call.scorer is None else await self._score(call, call.scorer)
        if call.params.max_tokens:
            await self._sample(call)
        else:
            for i, choice in enumerate(call.choices):
                choice.sampled.finish = FinishEvent(i, "length")
        said: list[dict[str, Any]] = []
        for choice in call.choices:
            choice.read(renderer, call.params.stop)
            said.append(
                choice.response(
                    renderer,
                    logprobs=request.logprobs,
                    token_ids=request.return_token_ids,
                    prompt_logprobs=scores,
                )
            )
        if call.heading.fingerprint is None:  # no token was sampled
            call.heading.fingerprint = _fingerprint(
                call.adapter, adapter_version(self._deps, call.adapter)
            )
        sampled = sum(len(choice.sampled.ids) for choice in call.choices)
        usage = chat_objects.usage(len(call.prompt.ids), sampled)
        response = chat_objects.completion(call.heading, said, usage)
        if request.return_token_ids:
            response["prompt_token_ids"] = call.prompt.ids
        return response

    def _choice(self, call: SampledCall, index: int, write: Write | None) -> Choice:
        renderer, stop = self._renderer, call.params.stop
        parser: Parser = PlainTextParser()
        if call.is_chat:
            parser = renderer.parser(
                tools=call.request.tools or False,
                opened=call.prompt.opened,
                one_call=call.one_call,
            )
        reader = None
        if write is not None:
            reader = ChoiceStream(
                call.request, call.heading, call.prompt.ids, stop, index, renderer, parser, write
            )
        elif call.one_call:
            reader = ChoiceReader(renderer, parser, stop)
        return Choice(index, parser, reader)

    async def _score(self, call: SampledCall, scorer: PromptScorer) -> list[dict[str, Any]]:
        """Return an entry for each prompt token; the first has no log-prob. They never train: a
        row's ``response_ids`` are the sampled tokens."""
        ids, renderer = call.prompt.ids, self._renderer
        events = await scorer.score(ids, call.adapter, call.params.top_logprobs)
        entries = chat_objects.logprob_entries(
            renderer,
            ids,
            [0.0, *(event.logprob for event in events)],
            [(), *(event.top or () for event in events)],
            hidden=True,
        )
        entries[0] |= {"logprob": None, "top_logprobs": None}
        return entries

    async def _sample(self, call: SampledCall) -> None:
        choices, tops = call.choices, call.params.top_logprobs > 0
        unfinished = len(choices)
        failed: ApiError | None = None
        events = self._deps.sampler.sample(call.prompt.ids, call.params, call.adapter)
        try:
            async for event in events:
                choice = choices[event.choice]
                sampled = choice.sampled
                if sampled.finish is not None:
                    continue  # ended here already, while the other choices go on
                if isinstance(event, FinishEvent):
                    sampled.finish = event
                    if event.reason in ("error", "cancelled"):
                        failed = unavailable(
                            f"the sampler failed: {event.error or event.reason}", "sampler_error"
                        )
                else:
                    sampled.add(event, tops=tops)
                    if call.heading.fingerprint is None:
                        call.heading.fingerprint = _fingerprint(call.adapter, event.adapter_version)
                    if choice.reader is None:
                        continue
                    await choice.reader.push(sampled)
                    if choice.parser.ended_at < 0:
                        continue
                    sampled.finish = FinishEvent(event.choice, "stop")
                unfinished -= 1
                if not unfinished:
                    break
        finally:
            if call.memory is not None and call.memory.spent is not None:
                call.memory.spent.tokens += sum(len(one.sampled.ids) for one in choices)
            close = getattr(events, "aclose", None)  # cancels the sample, if it goes on
            if close is not None:
                await close()
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")
        if failed is not None:
            raise failed


def adapter_version(deps: GatewayDependencies, adapter: str | None) -> int | None:
    return None if adapter is None else deps.sampler.adapters.get(adapter)


def _refusal(call: SampledCall, error: Exception) -> ApiError:
    """The answer to a client whose request the sampler refused or failed."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            param = "messages" if call.is_chat else "prompt"
            return ApiError(400, str(error), param=param, code="context_length_exceeded")
        case GrammarError():
            param = None if call.constraint is None else call.constraint.param
            return invalid(param, f"{param} cannot be enforced: {error}")
        case RefusedError():
            return refused_by_sampler(error.code, str(error))
        case _:
            message = f"the sampler failed: {type(error).__name__}: {error}"
            return unavailable(message, "sampler_error")


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"
