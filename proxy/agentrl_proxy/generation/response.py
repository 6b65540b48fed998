"""Generate the response of an accepted call: sample its choices, parse and describe them.

A token's text is held back inside a character, a stop string or a tool call's delimiter. The last
chunks are made separately, because they leave only once the answer is durable.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import ApiError, invalid, refused_by_sampler, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.continuity import Prompt
from agentrl_proxy.rendering.detokenizer import Detokenizer, whole_text
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply
from agentrl_proxy.rendering.structured_output import Constraint
from agentrl_proxy.rendering.tool_call_parser import PLAIN_TEXT, ReplyParser
from agentrl_proxy.requests.lifecycle import OpenCall
from agentrl_proxy.requests.recording import Sampled
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
    renderer: Renderer  # with the request's switches
    prompt: Prompt
    params: DecodingParams
    constraint: Constraint | None
    adapter: str | None
    one_call: bool  # the answer ends where a second tool call begins
    rows: list[Call]
    choices: list[Choice] = field(default_factory=list["Choice"])
    error_status: int | None = None  # of the answer, if ``generate`` failed

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
        call.choices = [Choice(row.choice, call, call.renderer, write) for row in call.rows]
        scores = await _score(deps, call) if call.request.scored else None
        if call.params.max_tokens:
            await _sample(deps, call)
        else:
            for i, choice in enumerate(call.choices):
                choice.sampled.finish = FinishEvent(i, "length")
        if heading.fingerprint is None:  # no token was sampled
            heading.fingerprint = _fingerprint(call.adapter, call.rows[0].adapter_version)
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
        call.error_status = refusal.status
        if refusal.code == "sampler_error" and error is not refusal:
            log.exception("sampling failed for %s", heading.id)
        raise refusal from None


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


class Choice:
    """One choice of an answer that is being generated: its tokens, its text, and its chunks.

    Args:
        index: in the response.
        write: sends the chunks of a stream.
    """

    def __init__(
        self, index: int, call: SampledCall, renderer: Renderer, write: Write | None
    ) -> None:
        self._index, self._call, self._renderer, self._write = index, call, renderer, write
        self._tokens = Detokenizer(renderer.decode_raw, call.params.stop)
        self.in_pieces = write is not None or call.one_call
        """Whether its text is read while it is sampled; else when it is whole."""
        self.parser = ReplyParser(PLAIN_TEXT, tools=False)
        if call.is_chat:
            self.parser = renderer.parser(
                tools=call.request.tools or False,
                opening=call.prompt.opening,
                one_call=call.one_call,
            )
        self.sampled = Sampled()
        self.text = ""
        self.reply = ParsedReply()
        self._sent = 0  # log-probs of the ids before this have been sent
        self._begun = False

    async def push(self) -> None:
        """Read the newest token; send the text that it completes."""
        token_id = self.sampled.ids[-1]
        if token_id in self._renderer.hidden:
            return
        if piece := self._tokens.push(token_id):
            reply = self.parser.feed(piece)
            if self._write is not None and (delta := chat_objects.reply_delta(reply)):
                if not self._begun:
                    first = {"content": None} if "tool_calls" in delta else {}
                    delta = {"role": "assistant", **first, **delta}
                await self._write(self._chunk(delta))

    def read(self) -> None:
        """Parse the reply, whose tokens are all there."""
        if self.in_pieces:
            rest = self._tokens.finish()
        else:
            visible = [i for i in self.sampled.ids if i not in self._renderer.hidden]
            rest = whole_text(self._renderer.decode_raw, visible, self._call.params.stop)
        self.reply, self.text = self.parser.finish(rest), self.parser.text
        self.sampled.cut_at_call = self.parser.ended_at >= 0

    def response(self, prompt_logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the choice as it stands in a chat completion.

        Args:
            prompt_logprobs: of the prompt's tokens; then special tokens have entries, too.
        """
        finish = self.sampled.finish
        assert finish is not None
        called = bool(self.reply.tool_calls) and finish.reason == "stop"
        reason = "tool_calls" if called else finish.reason
        entries = self._entries(0, hidden=prompt_logprobs is not None)
        message = chat_objects.message(self.reply)
        said = chat_objects.choice(self._index, reason, entries, message=message)
        if finish.stop_string is not None:
            said["stop_reason"] = finish.stop_string  # vLLM's field
        if prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs
        if self._call.request.return_token_ids:
            said["token_ids"] = self.sampled.ids
        return said

    def last_chunks(self, said: dict[str, Any]) -> list[bytes]:
        """Return the chunks with what was held back and the finish reason.

        Args:
            said: the choice in the whole answer.
        """
        delta = chat_objects.reply_delta(self.parser.remainder(self.reply))
        if not self._begun:
            delta = {"role": "assistant", "content": said["message"]["content"], **delta}
        # In this order: some dialects number their events.
        held = [self._chunk(delta)] if delta or self._entries(self._sent) else []
        request, heading = self._call.request, self._call.client.heading
        return [*held, chat_objects.last_chunk(request.dialect, heading, said)]

    def _chunk(self, delta: dict[str, Any]) -> bytes:
        self._begun = True
        entries = None
        if self._call.request.logprobs:
            entries, self._sent = self._entries(self._sent), len(self.sampled.ids)
        choice = chat_objects.choice(self._index, None, entries, delta=delta)
        return self._call.request.dialect.chunk(self._call.client.heading, choice)

    def _entries(self, start: int, *, hidden: bool = False) -> list[dict[str, Any]] | None:
        """Return the log-probs of the tokens from ``start`` on, if the request wants them."""
        if not self._call.request.logprobs:
            return None
        one = self.sampled
        parts = (one.ids[start:], one.logprobs[start:], one.tops[start:])
        return chat_objects.logprob_entries(self._renderer, *parts, hidden=hidden)
