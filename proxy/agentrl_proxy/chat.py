"""One completion: request → prompt → tokens → answer, recorded before it leaves.

Knows the parts and the order in which they act. Does not know routes, sockets, credentials or the
client's protocol: the answer is a chat completion, which the request's dialect says, and a
streamed one leaves through a ``write`` function, and a client that went away shows as the
cancellation of ``ChatService.run``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl_proxy import wire
from agentrl_proxy.admission import Admission, Slot
from agentrl_proxy.attempts import Answer, Attempt, Attempts
from agentrl_proxy.auth import Caller, ask
from agentrl_proxy.constraints import Constraint, Constraints
from agentrl_proxy.continuity import Key, Prompt, remember_reply, render_prompt
from agentrl_proxy.deps import GatewayDeps, GatewayStats
from agentrl_proxy.detokenize import Detokenizer, first_stop, whole_text
from agentrl_proxy.errors import (
    ApiError,
    attempt_sealed,
    context_length_exceeded,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.openai_types import ChatRequest, sampling_value
from agentrl_proxy.recording import (
    CallRecord,
    Sampled,
    agent_name,
    derived_seed,
    open_calls,
)
from agentrl_proxy.rendering import Renderer
from agentrl_proxy.replies import Parser, PlainText, Reply, ToolCall, joined
from agentrl_proxy.sampler import (
    ContextLengthError,
    FinishEvent,
    GrammarError,
    RefusedError,
    SampleEvent,
    SamplingParams,
)
from agentrl_tracer.schemas import AttemptState, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

Write = Callable[[bytes], Awaitable[None]]

_DEFAULT_MAX_TOKENS = 4096  # only where neither anybody nor the context length sets a limit
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


@dataclass(frozen=True, slots=True)
class BarePrompt:
    """Tokens to go on from, no chat: the answer is plain text and no conversation to remember."""

    ids: list[int]
    heading: wire.Heading  # shared by all prompts of a request
    first_choice: int  # index in the response of this prompt's first choice


@dataclass(slots=True)
class Job:
    """An accepted request, or one of its bare prompts: the rows are open."""

    request: ChatRequest
    caller: Caller
    memory: Attempt | None
    answer: Answer | None  # what retries of this request wait for
    prompt: Prompt
    params: SamplingParams
    constraint: Constraint | None
    adapter: str | None
    heading: wire.Heading
    record: CallRecord
    slot: Slot
    first_choice: int

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)

    @property
    def wanted_by_retry(self) -> bool:
        return self.answer is not None and self.answer.waiting > 0


class ChatService:
    """Answers chat completions."""

    def __init__(self, deps: GatewayDeps, attempts: Attempts, stats: GatewayStats) -> None:
        self.deps = deps
        self.stats = stats
        self._attempts = attempts
        self._constraints = Constraints(deps.renderer)
        self._admission = Admission(deps, stats)

    # --- accepting

    def resolve_model(self, model: str, headers: Mapping[str, str]) -> str | None:
        """The adapter that a requested model name means, or its agent; None is the base model."""
        deps = self.deps
        if model in deps.models:
            return deps.models[model]
        if (adapter := deps.agents.get(agent_name(headers) or "")) is not None:
            return adapter
        if deps.accept_any_model:
            return deps.default_adapter
        raise model_not_found(model)

    async def accept(
        self,
        request: ChatRequest,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
        bare: BarePrompt | None = None,
    ) -> Job:
        """Everything that can be refused is refused here, before a row exists."""
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        try:
            slot = self._admission.enter(request.n)
        except ApiError:
            if memory is not None:
                memory.refused(body, headers.get("idempotency-key"))
            raise
        try:
            return await self._accept(request, body, caller, memory, headers, slot, bare)
        except BaseException:
            slot.leave()
            raise

    async def _accept(
        self,
        request: ChatRequest,
        body: bytes,
        caller: Caller,
        memory: Attempt | None,
        headers: Mapping[str, str],
        slot: Slot,
        bare: BarePrompt | None,
    ) -> Job:
        deps = self.deps
        adapter = self.resolve_model(request.model, headers)
        if not deps.sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        if adapter is not None and adapter not in deps.sampler.adapters:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        attempt = caller.attempt
        constraint = await self._constraints.of(request)
        if bare is None:
            prompt = self.render(request, caller, headers)
            heading = wire.Heading(wire.new_id(request.dialect.id_prefix), request.model)
            heading.prompt_tokens = len(prompt.ids)
        else:
            prompt = Prompt(bare.ids, [], Key(b"", b"", adapter), continued=False)
            heading = bare.heading
        params = self._params(request, caller, len(prompt.ids))
        if constraint is not None:
            params = replace(params, grammar=constraint.grammar)
        seq = 0
        if attempt is not None and memory is not None:
            attempt_id = attempt.attempt_id
            room = await self._admission.within_budget(attempt, memory, params.n, len(prompt.ids))
            if room is not None and room < params.max_tokens:
                params = replace(params, max_tokens=room)
            seq = await memory.take_seq(lambda: ask(deps.store, deps.store.next_seq, attempt_id))
            if params.seed is None:
                params = replace(params, seed=derived_seed(attempt.seed, seq))
        version = None if adapter is None else deps.sampler.adapters.get(adapter)
        first_choice = 0 if bare is None else bare.first_choice
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
            constrained=None if constraint is None else constraint.kind,
            branched=None if prompt.branched is None else prompt.branched.value,
            params=params,
            request=request.raw,
            headers=headers,
            first_choice=first_choice,
        )
        self.stats.accepted += params.n
        self.stats.constrained += constraint is not None
        self.stats.continued += prompt.continued
        self.stats.rendered += not prompt.continued
        if prompt.branched is not None:
            branched, why = self.stats.branched, prompt.branched.value
            branched[why] = branched.get(why, 0) + 1
        answer = None
        if memory is not None:
            answer = memory.begin(body, headers.get("idempotency-key"))
        return Job(
            request, caller, memory, answer, prompt, params, constraint, adapter, heading, record,
            slot, first_choice,
        )  # fmt: skip

    def render(self, request: ChatRequest, caller: Caller, headers: Mapping[str, str]) -> Prompt:
        """The prompt of a request, continuing what its caller's attempt has had so far."""
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        return render_prompt(
            self.deps.renderer,
            None if memory is None else memory.conversations,
            request.messages,
            request.tools,
            self.resolve_model(request.model, headers),
        )

    async def earlier_answer(
        self, body: bytes, caller: Caller, headers: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """The answer to an identical request of this attempt, waited for if still on its way."""
        if caller.attempt is None:
            return None
        # The client closed the connection of the request that it repeats: let that be seen first.
        await asyncio.sleep(0)
        memory = self._attempts.get(caller.attempt.attempt_id)
        answer = memory.earlier(body, headers.get("idempotency-key"))
        if answer is None:
            return None
        answer.waiting += 1
        answer.claims += 1
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
        room = self.room(prompt_tokens)
        if room is not None:
            # A limit is a limit, not a demand: an answer that fits is better than a refusal.
            values["max_tokens"] = min(values.get("max_tokens", room), room)
        values.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        vocab = deps.renderer.vocab_size
        if any(token_id >= vocab for token_id, _ in request.logit_bias):
            raise invalid("logit_bias", f"logit_bias: this model's token ids are 0 to {vocab - 1}")
        return SamplingParams(
            n=request.n, top_logprobs=request.top_logprobs, logit_bias=request.logit_bias, **values
        )

    def room(self, prompt_tokens: int) -> int | None:
        """How many tokens an answer may have; None: the sampler will say."""
        context_length = self.deps.context_length
        if context_length is None:
            return None
        if prompt_tokens >= context_length:
            raise context_length_exceeded(prompt_tokens, context_length)
        return context_length - prompt_tokens

    async def give_up(self, job: Job) -> None:
        """Ends an accepted job that will not be run: another part of its request was refused."""
        job.slot.leave()
        if job.answer is not None and job.memory is not None:
            job.memory.abandon(job.answer)
        sampled = [Sampled() for _ in range(job.params.n)]
        reason = "another prompt of the request was refused"
        await self._close(job, sampled, CallState.ERROR, SkipReason.SAMPLER_ERROR, reason)

    # --- answering

    async def run(self, job: Job, write: Write | None) -> dict[str, Any]:
        """Samples, records, answers. With ``write`` the answer leaves in chunks as it is made.

        Returns:
            A chat completion, whatever the dialect.

        Raises:
            ApiError: the sampler failed, or the attempt was sealed meanwhile.
            asyncio.CancelledError: the client went away; the partial answer is recorded.
        """
        self.stats.in_flight += 1
        if job.memory is not None:
            job.memory.in_flight += 1
        try:
            response = await self._run(job, write)
            job.slot.leave(answered=True)
        except BaseException:
            if job.answer is not None and job.memory is not None:
                job.memory.abandon(job.answer)
            raise
        finally:
            job.slot.leave()
            self.stats.in_flight -= 1
            if job.memory is not None:
                job.memory.in_flight -= 1
        self.stats.completed += 1
        return response

    async def _run(self, job: Job, write: Write | None) -> dict[str, Any]:
        renderer = self.deps.renderer
        tools = job.request.tools or False
        sampled = [Sampled() for _ in range(job.params.n)]
        parsers: list[Parser] = [
            renderer.parser(tools=tools, opened=job.prompt.opened) if job.is_chat else PlainText()
            for _ in sampled
        ]
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
            withdrawn = [parser.withdrawn if streams else [] for parser in parsers]
            response = self._response(job, sampled, replies, withdrawn)
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            await self._close(job, sampled, CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED)
            raise
        except ContextLengthError as error:
            await self._fail(job, sampled, error)
            param = "messages" if job.is_chat else "prompt"
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
        except GrammarError as error:
            await self._fail(job, sampled, error)
            param = None if job.constraint is None else job.constraint.param
            raise invalid(param, f"{param} cannot be enforced: {error}") from None
        except RefusedError as error:
            await self._fail(job, sampled, error)
            raise refused_by_sampler(error.code, str(error)) from None
        except ApiError as error:
            await self._fail(job, sampled, error)
            raise
        except Exception as error:
            log.exception("sampling failed for %s", job.heading.id)
            await self._fail(job, sampled, error)
            raise unavailable(f"the sampler failed: {type(error).__name__}: {error}",
                              "sampler_error") from error  # fmt: skip
        await self._commit(job, sampled, response)
        if job.memory is not None and job.is_chat:
            for i, one in enumerate(response["choices"]):
                self._remember(job, job.memory, one["message"], sampled[i], texts[i])
                if withdrawn[i]:  # an agent may drop the calls that never became any
                    self._remember(job, job.memory, wire.message(replies[i]), sampled[i], texts[i])
        if job.memory is not None and job.answer is not None and not job.answer.done.done():
            job.memory.answered(job.answer, response)
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
            if job.memory is not None and job.memory.spent is not None:
                job.memory.spent.tokens += sum(len(one.ids) for one in sampled)
            await _aclose(events)
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")

    def _response(
        self,
        job: Job,
        sampled: list[Sampled],
        replies: list[Reply],
        withdrawn: list[list[ToolCall]],
    ) -> dict[str, Any]:
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
            message = wire.message(reply, withdrawn[i])
            choice = wire.choice(job.first_choice + i, message, reason, logprobs)
            if one.finish is not None and one.finish.stop_string is not None:
                choice["stop_reason"] = one.finish.stop_string  # as vLLM tells it
            if job.request.return_token_ids:
                choice["token_ids"] = one.ids
            choices.append(choice)
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
        chunks.append(job.request.dialect.end(response))
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
        whole = job.request.dialect.whole
        responses = [
            whole({**response, "choices": [one]}) for one in response["choices"]
        ] if len(sampled) > 1 else [whole(response)]  # fmt: skip
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
        text = text.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
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
        self, job: Job, index: int, renderer: Renderer, parser: Parser, write: Write
    ) -> None:
        self._job = job
        self._index = job.first_choice + index
        self._chunk = job.request.dialect.chunk
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
        delta = wire.reply_delta(self._parser.feed(piece)) if piece else {}
        if not delta:
            return
        if not self._begun:
            self._begun = True
            first: dict[str, Any] = {"role": "assistant"}
            if "tool_calls" in delta:
                first["content"] = None
            delta = first | delta
        logprobs = None
        if self._job.request.logprobs:
            start, self._sent = self._sent, len(one.ids)
            logprobs = wire.logprob_entries(
                self._renderer, one.ids[start:], one.logprobs[start:], one.tops[start:]
            )
            self._sent_entries += len(logprobs)
        await self._write(self._chunk(self._job.heading, self._index, delta, logprobs=logprobs))

    def feed_rest(self) -> None:
        """Gives the parser the text that was held back; what it shows goes with the last chunks."""
        self._held = self._parser.feed(self._tokens.finish())

    def last_chunks(self, whole: Reply, choice: dict[str, Any]) -> list[bytes]:
        """What was held back, the tool calls, and the finish reason."""
        rest = self._parser.remainder(whole)
        delta = wire.reply_delta(
            Reply(
                self._held.content + rest.content,
                self._held.reasoning + rest.reasoning,
                pieces=joined([*self._held.pieces, *rest.pieces]),
            )
        )
        if not self._begun:
            delta = {"role": "assistant", "content": choice["message"]["content"], **delta}
        logprobs = None
        if choice["logprobs"] is not None:
            logprobs = choice["logprobs"]["content"][self._sent_entries :]
        chunks: list[bytes] = []
        if delta or logprobs:
            chunks.append(self._chunk(self._job.heading, self._index, delta, logprobs=logprobs))
        chunks.append(
            wire.last_chunk(
                self._job.request.dialect, self._job.heading, choice, self._job.prompt.ids
            )
        )
        return chunks


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it has sent this same request before."""
    return headers.get("x-stainless-retry-count", "0") != "0"


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"


async def _aclose(events: AsyncIterator[SampleEvent]) -> None:
    """Ends the sample; a finished or already cancelled one does not mind."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
