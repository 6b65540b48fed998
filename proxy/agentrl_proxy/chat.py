"""One chat completion: request → prompt → tokens → answer, recorded before it leaves.

Knows the parts and the order in which they act. Does not know routes, sockets or credentials: a
streamed answer leaves through a ``write`` function, and a client that went away shows as the
cancellation of ``ChatService.run``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl_proxy import wire
from agentrl_proxy.attempts import Answer, Attempt, Attempts
from agentrl_proxy.auth import Caller, ask
from agentrl_proxy.continuity import Prompt, remember_reply, render_prompt
from agentrl_proxy.deps import GatewayDeps, GatewayStats
from agentrl_proxy.detokenize import Detokenizer, first_stop, whole_text
from agentrl_proxy.errors import (
    ApiError,
    attempt_sealed,
    context_length_exceeded,
    model_not_found,
    unavailable,
)
from agentrl_proxy.openai_types import ChatRequest, sampling_value
from agentrl_proxy.recording import CallRecord, Sampled, derived_seed, open_calls
from agentrl_proxy.rendering import Renderer
from agentrl_proxy.replies import Reply, ReplyParser
from agentrl_proxy.sampler import ContextLengthError, FinishEvent, SampleEvent, SamplingParams
from agentrl_tracer.schemas import AttemptState, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

Write = Callable[[bytes], Awaitable[None]]

_DEFAULT_MAX_TOKENS = 4096  # only where neither anybody nor the context length sets a limit
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


@dataclass(slots=True)
class Job:
    """An accepted request: its rows are open."""

    request: ChatRequest
    caller: Caller
    memory: Attempt | None
    body: bytes
    answer: Answer | None  # what retries of this request wait for
    prompt: Prompt
    params: SamplingParams
    adapter: str | None
    heading: wire.Heading
    record: CallRecord

    @property
    def wanted_by_retry(self) -> bool:
        return self.answer is not None and self.answer.waiting > 0


class ChatService:
    """Answers chat completions."""

    def __init__(self, deps: GatewayDeps, attempts: Attempts, stats: GatewayStats) -> None:
        self.deps = deps
        self.stats = stats
        self._attempts = attempts

    # --- accepting

    def resolve_model(self, model: str) -> str | None:
        """The adapter that a requested model name means; None is the base model."""
        deps = self.deps
        if model in deps.models:
            return deps.models[model]
        if deps.accept_any_model:
            return deps.default_adapter
        raise model_not_found(model)

    async def accept(
        self, request: ChatRequest, body: bytes, caller: Caller, headers: Mapping[str, str]
    ) -> Job:
        """Everything that can be refused is refused here, before a row exists."""
        deps = self.deps
        adapter = self.resolve_model(request.model)
        if not deps.sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        if adapter is not None and adapter not in deps.sampler.adapters:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        prompt = render_prompt(
            deps.renderer,
            None if memory is None else memory.conversations,
            request.messages,
            request.tools,
            adapter,
        )
        params = self._params(request, caller, len(prompt.ids))
        seq = 0
        if attempt is not None and memory is not None:
            attempt_id = attempt.attempt_id
            seq = await memory.take_seq(lambda: ask(deps.store, deps.store.next_seq, attempt_id))
            if params.seed is None:
                params = replace(params, seed=derived_seed(attempt.seed, seq))
        version = None if adapter is None else deps.sampler.adapters.get(adapter)
        heading = wire.Heading(wire.new_id("chatcmpl-"), request.model)
        record = open_calls(
            deps.writer,
            response_id=heading.id,
            run_id=deps.run_id,
            attempt=attempt,
            seq=seq,
            model=request.model,
            adapter=adapter,
            adapter_version=version,
            prompt_ids=prompt.ids,
            continued=prompt.continued,
            params=params,
            request=request.raw,
            headers=headers,
        )
        self.stats.accepted += params.n
        self.stats.continued += prompt.continued
        self.stats.rendered += not prompt.continued
        answer = None if memory is None else memory.begin(body)
        return Job(request, caller, memory, body, answer, prompt, params, adapter, heading, record)

    async def earlier_answer(self, body: bytes, caller: Caller) -> dict[str, Any] | None:
        """The answer to an identical request of this attempt, waited for if still on its way."""
        if caller.attempt is None:
            return None
        answer = self._attempts.get(caller.attempt.attempt_id).earlier(body)
        if answer is None:
            return None
        answer.waiting += 1
        try:
            response = await asyncio.shield(answer.done)
        except asyncio.CancelledError:
            if answer.done.cancelled():  # the first request failed: sample anew
                return None
            raise
        finally:
            answer.waiting -= 1
        self.stats.replayed += 1
        return response

    def _params(self, request: ChatRequest, caller: Caller, prompt_tokens: int) -> SamplingParams:
        """Forced by the attempt > asked for > the attempt's defaults > the gateway's."""
        deps = self.deps
        sampling = {} if caller.attempt is None else (caller.attempt.sampling or {})
        forced = sampling.get("force") or {}
        values: dict[str, Any] = {}
        for name in _TUNABLE:
            for source in (forced, request.sampling, sampling, deps.defaults):
                value = source.get(name)
                if value is not None:
                    values[name] = (
                        value if source is request.sampling else sampling_value(name, value)
                    )
                    break
        if deps.context_length is not None:
            room = deps.context_length - prompt_tokens
            if room < 1:
                raise context_length_exceeded(prompt_tokens, deps.context_length)
            # A limit is a limit, not a demand: an answer that fits is better than a refusal.
            values["max_tokens"] = min(values.get("max_tokens", room), room)
        values.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        return SamplingParams(n=request.n, top_logprobs=request.top_logprobs, **values)

    # --- answering

    async def run(self, job: Job, write: Write | None) -> dict[str, Any]:
        """Samples, records, answers. With ``write`` the answer leaves in chunks as it is made.

        Raises:
            ApiError: the sampler failed, or the attempt was sealed meanwhile.
            asyncio.CancelledError: the client went away; the partial answer is recorded.
        """
        self.stats.in_flight += 1
        if job.memory is not None:
            job.memory.in_flight += 1
        try:
            response = await self._run(job, write)
        except BaseException:
            if job.answer is not None and job.memory is not None:
                job.memory.abandon(job.body, job.answer)
                job.answer.done.cancel()
            raise
        finally:
            self.stats.in_flight -= 1
            if job.memory is not None:
                job.memory.in_flight -= 1
        self.stats.completed += 1
        return response

    async def _run(self, job: Job, write: Write | None) -> dict[str, Any]:
        renderer = self.deps.renderer
        tools = job.request.tools is not None
        sampled = [Sampled() for _ in range(job.params.n)]
        parsers = [renderer.parser(tools=tools) for _ in sampled]
        streams = None
        if write is not None:
            streams = [
                _ChoiceStream(job, i, renderer, parser, write) for i, parser in enumerate(parsers)
            ]
        try:
            await self._sample(job, sampled, streams)
            texts = [self._text(one, job.params) for one in sampled]
            if streams is not None:
                for stream in streams:
                    stream.feed_rest()
            else:
                for parser, text in zip(parsers, texts, strict=True):
                    parser.feed(text)
            replies = [parser.finish() for parser in parsers]
            response = self._response(job, sampled, replies)
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            await self._close(job, sampled, CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED)
            raise
        except ContextLengthError as error:
            await self._fail(job, sampled, error)
            raise ApiError(
                400, str(error), param="messages", code="context_length_exceeded"
            ) from None
        except ApiError as error:
            await self._fail(job, sampled, error)
            raise
        except Exception as error:
            log.exception("sampling failed for %s", job.heading.id)
            await self._fail(job, sampled, error)
            raise unavailable(f"the sampler failed: {type(error).__name__}: {error}",
                              "sampler_error") from error  # fmt: skip
        await self._commit(job, sampled, response)
        if job.memory is not None:
            for one, reply, text in zip(response["choices"], sampled, texts, strict=True):
                self._remember(job, job.memory, one["message"], reply, text)
        if job.answer is not None and not job.answer.done.done():
            job.answer.done.set_result(response)
        if write is not None and streams is not None:
            await self._finish_stream(job, streams, replies, response, write)
        return response

    async def _sample(
        self, job: Job, sampled: list[Sampled], streams: list[_ChoiceStream] | None
    ) -> None:
        tops = job.params.top_logprobs > 0
        unfinished = len(sampled)
        events = self.deps.sampler.sample(job.prompt.ids, job.params, job.adapter)
        try:
            async for event in events:
                one = sampled[event.choice]
                if isinstance(event, FinishEvent):
                    one.finish = event
                    unfinished -= 1
                    if event.reason in ("error", "cancelled"):
                        raise unavailable(
                            f"the sampler failed: {event.error or event.reason}", "sampler_error"
                        )
                    if not unfinished:
                        break
                    continue
                one.add(event, tops=tops)
                if job.heading.fingerprint is None:
                    job.heading.fingerprint = _fingerprint(job.adapter, event.adapter_version)
                if streams is not None:
                    await streams[event.choice].push(one)
        finally:
            await _aclose(events)
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")

    def _response(self, job: Job, sampled: list[Sampled], replies: list[Reply]) -> dict[str, Any]:
        heading = job.heading
        if heading.fingerprint is None:  # not one token was sampled
            version = None
            if job.adapter is not None:
                version = self.deps.sampler.adapters.get(job.adapter)
            heading.fingerprint = _fingerprint(job.adapter, version)
        choices: list[dict[str, Any]] = []
        for i, (one, reply) in enumerate(zip(sampled, replies, strict=True)):
            reason = "stop" if one.finish is None else one.finish.reason
            if reply.tool_calls and reason == "stop":
                reason = "tool_calls"
            logprobs = None
            if job.request.logprobs:
                logprobs = wire.logprob_entries(self.deps.renderer, one.ids, one.logprobs, one.tops)
            choices.append(wire.choice(i, wire.message(reply), reason, logprobs))
            if job.request.return_token_ids:
                choices[-1]["token_ids"] = one.ids
        usage = wire.usage(len(job.prompt.ids), sum(len(one.ids) for one in sampled))
        response = wire.completion(heading, choices, usage)
        if job.request.return_token_ids:
            response["prompt_token_ids"] = job.prompt.ids
        return response

    async def _finish_stream(
        self,
        job: Job,
        streams: list[_ChoiceStream],
        replies: list[Reply],
        response: dict[str, Any],
        write: Write,
    ) -> None:
        """The last chunks, all in one write: they leave only after the commit."""
        chunks: list[bytes] = []
        for stream, reply, one in zip(streams, replies, response["choices"], strict=True):
            chunks += stream.last_chunks(reply, one)
        if job.request.include_usage:
            chunks.append(wire.usage_chunk(job.heading, response["usage"]))
        chunks.append(wire.DONE)
        await write(b"".join(chunks))

    def _text(self, one: Sampled, params: SamplingParams) -> str:
        renderer = self.deps.renderer
        visible = [i for i in one.ids if not renderer.is_hidden(i)]
        return whole_text(renderer.decode_raw, visible, params.stop)

    def _remember(
        self, job: Job, memory: Attempt, message: dict[str, Any], one: Sampled, text: str
    ) -> None:
        """Keeps the conversation for its next turn. The answer is durable: nothing may fail it."""
        renderer, stop = self.deps.renderer, job.params.stop
        try:
            cut = bool(stop) and first_stop(renderer.decode(one.ids), stop) is not None
            remember_reply(
                renderer, memory.conversations, job.prompt, message, one.ids, text, cut=cut
            )
        except Exception:
            log.exception("%s will not be continued", job.heading.id)

    # --- recording

    async def _commit(self, job: Job, sampled: list[Sampled], response: dict[str, Any]) -> None:
        """After this the answer is durable, and may leave."""
        responses = [
            {**response, "choices": [one]} for one in response["choices"]
        ] if len(sampled) > 1 else [response]  # fmt: skip
        try:
            state = await asyncio.shield(
                job.record.finish(sampled, CallState.COMPLETED, responses=responses)
            )
        except asyncio.CancelledError:  # gone in the last moment; the row is complete
            self.stats.cancelled += 1
            raise
        except Exception as error:
            self.stats.failed += 1
            log.exception("the store did not take %s", job.heading.id)
            raise unavailable("the answer could not be recorded", "store_error") from error
        attempt = job.caller.attempt
        if attempt is not None and state is not AttemptState.RUNNING:
            self.stats.late += 1
            self._attempts.forget(attempt.attempt_id)
            raise attempt_sealed(state)

    async def _fail(self, job: Job, sampled: list[Sampled], error: Exception) -> None:
        self.stats.failed += 1
        text = error.message if isinstance(error, ApiError) else f"{type(error).__name__}: {error}"
        await self._close(job, sampled, CallState.ERROR, SkipReason.SAMPLER_ERROR, text)

    async def _close(
        self,
        job: Job,
        sampled: list[Sampled],
        state: CallState,
        reason: SkipReason,
        error: str | None = None,
    ) -> None:
        try:
            await asyncio.shield(job.record.finish(sampled, state, skip_reason=reason, error=error))
        except Exception:  # the client hears of the first failure, the log of both
            log.exception("the store did not take %s (%s)", job.heading.id, state)


class _ChoiceStream:
    """One choice of a streamed answer: tokens in, chunks out."""

    def __init__(
        self, job: Job, index: int, renderer: Renderer, parser: ReplyParser, write: Write
    ) -> None:
        self._job = job
        self._index = index
        self._renderer = renderer
        self._parser = parser
        self._write = write
        self._tokens = Detokenizer(renderer.decode_raw, job.params.stop)
        self._sent = 0  # ids before this have their log-probs on the wire
        self._sent_entries = 0
        self._held = Reply()
        self._begun = False

    async def push(self, one: Sampled) -> None:
        """The choice has one more token."""
        token_id = one.ids[-1]
        if self._renderer.is_hidden(token_id):
            return
        piece = self._tokens.push(token_id)
        delta = wire.text_delta(self._parser.feed(piece)) if piece else {}
        if not delta:
            return
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", **delta}
        logprobs = None
        if self._job.request.logprobs:
            start, self._sent = self._sent, len(one.ids)
            logprobs = wire.logprob_entries(
                self._renderer, one.ids[start:], one.logprobs[start:], one.tops[start:]
            )
            self._sent_entries += len(logprobs)
        await self._write(wire.chunk(self._job.heading, self._index, delta, logprobs=logprobs))

    def feed_rest(self) -> None:
        """Gives the parser the text that was held back; what it shows goes with the last chunks."""
        self._held = self._parser.feed(self._tokens.finish())

    def last_chunks(self, whole: Reply, choice: dict[str, Any]) -> list[bytes]:
        """What was held back, the tool calls, and the finish reason."""
        rest = self._parser.remainder(whole)
        held = Reply(self._held.content + rest.content, self._held.reasoning + rest.reasoning)
        delta = wire.text_delta(held) | wire.tool_call_delta(choice["message"])
        if not self._begun:
            delta = {"role": "assistant", "content": choice["message"]["content"], **delta}
        logprobs = None
        if choice["logprobs"] is not None:
            logprobs = choice["logprobs"]["content"][self._sent_entries :]
        chunks: list[bytes] = []
        if delta or logprobs:
            chunks.append(wire.chunk(self._job.heading, self._index, delta, logprobs=logprobs))
        chunks.append(wire.last_chunk(self._job.heading, choice, self._job.prompt.ids))
        return chunks


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"


async def _aclose(events: AsyncIterator[SampleEvent]) -> None:
    """Ends the sample; a finished or already cancelled one does not mind."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
