"""Generate the response of an accepted call: sample its choices, parse and describe them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import ApiError, invalid, refused_by_sampler, unavailable
from agentrl_proxy.generation.choices import Choice
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.continuity import Prompt
from agentrl_proxy.rendering.structured_output import Constraint
from agentrl_proxy.rendering.tool_call_parser import PlainTextParser
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


@dataclass(slots=True)
class SampledCall(OpenCall):
    """An accepted request to our sampler, or one of its prompts."""

    request: ChatRequest
    prompt: Prompt
    params: DecodingParams
    constraint: Constraint | None
    adapter: str | None
    one_call: bool  # the answer ends where a second tool call begins
    rows: list[Call]
    choices: list[Choice] = field(default_factory=list[Choice])

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)


async def generate_response(
    deps: GatewayDependencies, call: SampledCall, write: Write | None
) -> dict[str, Any]:
    """Return a chat completion. With ``write``, all chunks but the last ones leave already.

    Raises:
        ApiError: the sampler refused or failed; ``call.error`` says how.
    """
    heading = call.client.heading
    try:
        call.choices = [_choice(deps, call, row.choice, write) for row in call.rows]
        scores = await _score(deps, call) if call.request.scored else None
        if call.params.max_tokens:
            await _sample(deps, call)
        else:
            for i, choice in enumerate(call.choices):
                choice.sampled.finish = FinishEvent(i, "length")
        if heading.fingerprint is None:  # no token was sampled
            version = deps.sampler.adapters.get(call.adapter or "")
            heading.fingerprint = _fingerprint(call.adapter, version)
        for choice in call.choices:
            choice.read()
        sampled = sum(len(choice.sampled.ids) for choice in call.choices)
        usage = chat_objects.usage(len(call.prompt.ids), sampled)
        said = [choice.response(scores) for choice in call.choices]
        response = chat_objects.completion(heading, said, usage)
        if call.request.return_token_ids:
            response["prompt_token_ids"] = heading.prompt_ids = call.prompt.ids
        return response
    except Exception as error:
        refusal = _refusal(call, error)
        said = refusal.message if error is refusal else f"{type(error).__name__}: {error}"
        call.error = said.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
        if refusal.code == "sampler_error" and error is not refusal:
            log.exception("sampling failed for %s", heading.id)
        raise refusal from None


def _choice(
    deps: GatewayDependencies, call: SampledCall, index: int, write: Write | None
) -> Choice:
    request, heading, stop = call.request, call.client.heading, call.params.stop
    parser = PlainTextParser()
    if call.is_chat:
        parser = deps.renderer.parser(
            tools=request.tools or False, opened=call.prompt.opened, one_call=call.one_call
        )
    in_pieces = write is not None or call.one_call
    return Choice(index, request, heading, deps.renderer, parser, stop, write, in_pieces)


async def _score(deps: GatewayDependencies, call: SampledCall) -> list[dict[str, Any]]:
    """Return an entry for each prompt token; the first has no log-prob. They never train: a row's
    ``response_ids`` are the sampled tokens."""
    assert isinstance(deps.sampler, PromptScorer)
    events = await deps.sampler.score(call.prompt.ids, call.adapter, call.params.top_logprobs)
    entries = chat_objects.logprob_entries(
        deps.renderer,
        call.prompt.ids,
        [0.0, *(event.logprob for event in events)],
        [(), *(event.top or () for event in events)],
        hidden=True,
    )
    entries[0] |= {"logprob": None, "top_logprobs": None}
    return entries


async def _sample(deps: GatewayDependencies, call: SampledCall) -> None:
    choices, heading, tops = call.choices, call.client.heading, call.params.top_logprobs > 0
    unfinished = len(choices)
    failed: ApiError | None = None
    events = deps.sampler.sample(call.prompt.ids, call.params, call.adapter)
    try:
        async for event in events:
            choice = choices[event.choice]
            sampled = choice.sampled
            if sampled.finish is not None:
                continue  # ended here already, while the other choices go on
            if isinstance(event, FinishEvent):
                sampled.finish = event
                if event.reason in ("error", "cancelled"):
                    said = f"the sampler failed: {event.error or event.reason}"
                    failed = unavailable(said, "sampler_error")
            else:
                sampled.add(event, tops=tops)
                if heading.fingerprint is None:
                    heading.fingerprint = _fingerprint(call.adapter, event.adapter_version)
                if not choice.in_pieces:
                    continue
                await choice.push()
                if choice.parser.ended_at < 0:
                    continue
                sampled.finish = FinishEvent(event.choice, "stop")
            unfinished -= 1
            if not unfinished:
                break
    finally:
        memory = call.client.memory
        if memory is not None and memory.spent is not None:
            memory.spent.tokens += sum(len(one.sampled.ids) for one in choices)
        close = getattr(events, "aclose", None)  # cancels the sample, if it goes on
        if close is not None:
            await close()
    if unfinished:
        raise unavailable("the sampler ended without finishing", "sampler_error")
    if failed is not None:
        raise failed


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"


def _refusal(call: SampledCall, error: Exception) -> ApiError:
    """Return the answer to a client whose request the sampler refused or failed."""
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
